// Problems drawn at random, solved by a backend and compared row by row with float64: what no list of cases thinks of,
// a key too many, a block left out, a stride mistaken, shows in the rows that it spoils.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "support/dequantized.h"

namespace octet::test {

// One problem of the precisions f32, f16 and bf16: every mask, option, layout and head dim that the C ABI has for them,
// up to 300 tokens and about 2^27 products.
struct RandomProblem {
  uint64_t seed;
  Pass pass;
  Case c{.name = "random"};
  Inputs in{};  // numbers that the precision holds, and the tensors' type too
  Attention attention{};
};
RandomProblem random_problem(uint64_t seed);
// One of the precisions of 8 bits, likewise: forward, and backward of int8 and sagebwd up to head dim 128.
RandomProblem random_problem_in_8_bits(uint64_t seed);
std::string text(const RandomProblem&);

// Where problems are solved.
struct Solver {
  const char* backend;
  std::function<std::unique_ptr<Place>()> place{};            // empty: the test's own memory
  std::function<bool(const RandomProblem&)> solves{};         // what its documentation says; empty: everything
  std::function<bool(const RandomProblem&)> has_bars{};       // whose rows are compared; empty: all
  std::function<bool(const RandomProblem&)> may_move_keys{};  // to KeyOrder::seen_first; empty: never
};

enum class Outcome { solved, rejected };
// Solves a problem, and expects that it is rejected only where it should be, and that every row is right.
Outcome expect_right(const RandomProblem&, const Solver&);

// How many problems, and from which seed: OCTET_RANDOM_PROBLEMS, or `count`, and OCTET_RANDOM_SEED, or 0.
struct Draws {
  uint64_t first, count;
};
Draws draws(uint64_t count);

}  // namespace octet::test
