// The tests of laws share this: running every pass of every precision on the CPU backend, and comparing.
#pragma once
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "support/cases.h"

namespace octet::test {

struct Recipe {
  Pass pass;
  Precision precision;
  BiasCorrection bias_correction = BiasCorrection::f16;
};
std::vector<Recipe> every_recipe();
std::string label(const testing::TestParamInfo<Recipe>&);
void PrintTo(const Recipe&, std::ostream*);

// A test per pass and precision.
class EveryRecipe : public testing::TestWithParam<Recipe> {};
// A test per precision of the forward pass.
class EveryForward : public testing::TestWithParam<Precision> {};

// A pass on the CPU backend, after its own forward pass where it needs one; o and lse of that are returned too.
Outputs compute(const Case&, const Inputs&, const Recipe&, unsigned threads = 0, const char* backend = "cpu");
Outputs forward(const Case&, const Inputs&, Precision);

// The outputs that a pass has, with their names.
struct NamedValues {
  const char* name;
  const Values* values;
};
std::vector<NamedValues> outputs_of(const Outputs&, Pass);

void expect_same_bits(const Values& got, const Values& want, const std::string& what);
void expect_same_bits(const Outputs& got, const Outputs& want, Pass pass, const std::string& what);

// That no element differs by more than `bound`.
void expect_near(const Values& got, const Values& want, double bound, const std::string& what);

// How far the outputs of a pass may be from float64: twice the error of plain rounding, plus what f32 arithmetic may
// add, as in tests/passes. Two results that a law makes equal differ by at most the sum of what both may. The float64
// results, which take far longer than the pass, are computed once for all outputs.
class Allowed {
 public:
  Allowed(const Case&, const Inputs&, const Recipe&);
  double operator()(Values Outputs::*output) const;

 private:
  Outputs exact_, plain_;
  Noise noise_;
};

}  // namespace octet::test
