// Random problems on the CPU, and that their bars would notice one key less.
#include <gtest/gtest.h>

#include <cstdio>

#include "support/random_problems.h"
#include "support/row_bars.h"

namespace octet::test {
namespace {

void expect_all_right(RandomProblem (*problem)(uint64_t seed), uint64_t otherwise) {
  const auto [first, count] = draws(otherwise);
  const auto solves = [](const RandomProblem& x) { return x.attention.smooth_q != Switch::on; };
  uint64_t solved = 0;
  for (uint64_t seed = first; seed < first + count; ++seed)
    solved += expect_right(problem(seed), {.backend = "cpu", .solves = solves}) == Outcome::solved;
  std::printf("random problems on cpu, from seed %llu: %llu solved, %llu rejected\n",
              static_cast<unsigned long long>(first), static_cast<unsigned long long>(solved),
              static_cast<unsigned long long>(count - solved));
}

TEST(RandomProblems, are_right_in_every_row) { expect_all_right(random_problem, 60); }
TEST(RandomProblems, are_right_in_every_row_in_8_bits) { expect_all_right(random_problem_in_8_bits, 100); }

// Masks that are added, of every broadcast, type and layout.
TEST(RandomProblems, give_gradients_of_masks) {
  const auto [first, count] = draws(30);
  uint64_t solved = 0;
  for (uint64_t seed = first; solved < count; ++seed) {
    RandomProblem x = random_problem(seed);
    if (x.pass != Pass::backward || x.in.mask.data.empty() || x.in.mask_dtype == DType::boolean) continue;
    x.c.dmask = true;
    solved += expect_right(x, {.backend = "cpu"}) == Outcome::solved;
  }
}

// Returns whether a problem has two keys or more, and each query sees all of them.
bool sees_all(const RandomProblem& x) {
  const Case& c = x.c;
  return c.batch && c.tokens_q && c.tokens_k >= 2 && c.cu_seqlens_q.empty() && !c.causal && !c.window &&
         !x.in.mask.present();
}

Inputs without_last_key(Inputs in) {
  in.mask = Values({1, 1, 1, in.k.shape[2]}, 1.0), in.mask_dtype = DType::boolean;
  in.mask.data.back() = 0.0;
  return in;
}

// The exact results of a problem without its last key lie beyond the bars of some row.
TEST(RandomProblems, have_bars_that_notice_a_lost_key) {
  int noticed = 0;
  for (uint64_t seed = 0; noticed < 30; ++seed) {
    RandomProblem x = random_problem(seed);
    const Case& c = x.c;
    if (!sees_all(x)) continue;
    SCOPED_TRACE(text(x));
    x.attention.backend = "reference";
    const Outputs saved = run(c, x.in, x.attention, Pass::forward), want = exact(c, x.in, x.pass);
    const RowBars bars = row_bars(c, x.in, x.attention, x.pass, want, saved);
    EXPECT_EQ(wrong_row(want, want, bars, x.pass), "");
    EXPECT_NE(wrong_row(exact(c, without_last_key(x.in), x.pass), want, bars, x.pass), "");
    ++noticed;
  }
}

// Likewise in 8 bits. A few queries may all give the last key next to nothing, and P of e4m3 hides a key among
// hundreds.
TEST(RandomProblems, have_bars_in_8_bits_that_notice_a_lost_key) {
  int noticed = 0;
  for (uint64_t seed = 0; noticed < 30; ++seed) {
    RandomProblem x = random_problem_in_8_bits(seed);
    const Precision precision = x.attention.precision;
    const bool e4m3 = precision == Precision::int8_fp8 || precision == Precision::fp8;
    if (!sees_all(x) || x.c.tokens_q < 8 || (e4m3 && x.c.tokens_k > 100)) continue;
    SCOPED_TRACE(text(x));
    x.attention.backend = "cpu";
    const Dequantized codes = dequantized(x.c, x.in, x.attention, x.pass, KeyOrder::given);
    Dequantized fewer = codes;
    fewer.in = without_last_key(codes.in);
    const Outputs want = exact(codes, x.pass);
    const RowBars bars = row_bars(codes, x.attention, x.pass, want, want);
    EXPECT_EQ(wrong_row(want, want, bars, x.pass), "");
    EXPECT_NE(wrong_row(exact(fewer, x.pass), want, bars, x.pass), "");
    ++noticed;
  }
}

// Keys whose ALiBi terms leave the row nearly all to its sink: dq of such rows is small, and still right.
TEST(RandomProblems, are_right_where_a_sink_outweighs_far_keys) {
  for (const Precision precision : {Precision::f32, Precision::f16, Precision::bf16}) {
    RandomProblem x{.seed = 1, .pass = Pass::backward};
    x.c = {.name = "far",
           .tokens_q = 20,
           .tokens_k = 90,
           .window = {{0, 3}},
           .alignment = Alignment::top_left,
           .dtype = DType::f16,
           .sinks = Sinks::shared,
           .alibi = Alibi::shared};
    x.in = draw(x.c, x.seed);
    for (Values* tensor : {&x.in.q, &x.in.k, &x.in.v, &x.in.do_})
      *tensor = rounded(rounded(*tensor, DType::bf16), DType::f16);  // numbers of every precision
    x.in.sinks.data = {5.0}, x.in.alibi_slopes.data = {0.25};
    x.attention = attention_of(x.c, precision, nullptr);
    expect_right(x, {.backend = "cpu"});
  }
}

}  // namespace
}  // namespace octet::test
