// Random problems on a GPU, in parts that run beside each other where a test runner shards them.
#include <gtest/gtest.h>

#include <cstdio>

#include "gpu/place.h"
#include "support/random_problems.h"

namespace octet::test {
namespace {

// What docs/kernels say of the backend.
bool solves(const RandomProblem& x) {
  const Case& c = x.c;
  const bool plain = !x.in.mask.present() && c.softcap == 0 && c.alibi == Alibi::none;
  const bool gproj = x.pass == Pass::backward && x.attention.bias_correction == BiasCorrection::gproj;
  return gpu_computes(x.pass, x.attention.precision) && (plain || gpu_has_general_logits()) &&
         (!gproj || gpu_has_gproj());
}

// ds of 16 bits has one power of two for many rows (docs/kernels/backward.md, Limits), and deterministic sums of dq
// have a unit, of which the bars know nothing: that small rows lose. Such problems are solved and not compared; those
// of gpu_test and the tests of Python hold this pass to its bars.
bool has_bars(const RandomProblem& x) { return x.pass != Pass::backward || x.attention.precision == Precision::f32; }

class GpuRandomProblems : public testing::TestWithParam<uint64_t> {
 public:
  static constexpr uint64_t kParts = 16;
  static void TearDownTestSuite() {
    std::printf("random problems on %s: %llu solved, %llu rejected\n", gpu_backend(),
                static_cast<unsigned long long>(solved_), static_cast<unsigned long long>(rejected_));
  }

 protected:
  static inline uint64_t solved_ = 0, rejected_ = 0;
};

TEST_P(GpuRandomProblems, are_right_in_every_row) {
  const auto [first, count] = draws(10000);
  const Solver gpu{gpu_backend(), [] { return std::make_unique<GpuPlace>(); }, solves, has_bars};
  for (uint64_t i = GetParam(); i < count; i += kParts)
    ++(expect_right(random_problem(first + i), gpu) == Outcome::solved ? solved_ : rejected_);
}

INSTANTIATE_TEST_SUITE_P(Parts, GpuRandomProblems, testing::Range<uint64_t>(0, GpuRandomProblems::kParts));

}  // namespace
}  // namespace octet::test
