// Bias of recipes: the error of delta = sum do o over rows built so that rounding o to bf16 always errs the same way
// (S7, S8). Unbiased: kappa <= .1 and |t| <= 4 over 24 seeds of 64 rows; biased: kappa >= .5. Tests are named after the
// input, where p v is rounded (early: before it is divided by l; flash: once, after) and the bias correction, as the
// rows of docs/numerics.md.
#include <gtest/gtest.h>

#include <cmath>
#include <octet/formats.hpp>
#include <random>

#include "core/o_residual.h"
#include "cpu/reference/attention.h"
#include "support/inputs.h"
#include "support/metrics.h"

namespace octet::reference {
namespace {

enum class Stored {
  bf16,
  bf16_and_residual,  // delta reads their sum
  bf16_and_byte,      // and here, with a residual of one byte
  bf16_stochastic     // rounded up with the probability of the part that is cut off
};

double stored_as(Stored stored, double x, std::mt19937_64& bits) {
  const double high = round_to(OCTET_BF16, x);
  if (stored == Stored::bf16) return high;
  if (stored == Stored::bf16_and_residual) return high + round_to(OCTET_BF16, x - high);
  if (stored == Stored::bf16_and_byte) {
    const int shift = residual_shift(OCTET_BF16);
    const auto o = static_cast<float>(high);
    return with_residual(o, residual_of(static_cast<float>(x), o, shift), shift);
  }
  const double ulp = std::ldexp(1.0, std::ilogb(x) - 7);
  return std::floor(x / ulp + std::uniform_real_distribution<double>()(bits)) * ulp;
}

struct BiasOf {
  test::Bias delta, outward;  // outward: of o, in units of its last bf16 place
};

BiasOf bias_of(const Recipe& recipe, bool small_ties, Stored stored) {
  BiasOf bias;
  std::mt19937_64 bits(1);
  for (const test::TiedRow& row : test::tied_rows(small_ties)) {
    Head head{.q = Matrix(1, 8),
              .k = Matrix(test::kTiedKeys, 8),
              .v = Matrix(test::kTiedKeys, test::kTiedDim),
              .keys = {{0, test::kTiedKeys}}};
    head.v.data = row.v;
    head.q[0][0] = 1.0;
    for (int64_t j = 0; j < test::kTiedKeys; ++j) head.k[j][0] = row.logits[static_cast<std::size_t>(j)];
    const Output want = forward(head, Recipe{}), got = forward(head, recipe);
    double error = 0.0;
    for (int64_t c = 0; c < test::kTiedDim; ++c) {
      const double e = stored_as(stored, got.o[0][c], bits) - want.o[0][c];
      error += row.do_[static_cast<std::size_t>(c)] * e;
      bias.outward.add(std::copysign(e, e * want.o[0][c]) / std::ldexp(1.0, std::ilogb(want.o[0][c]) - 7));
    }
    bias.delta.add(error);
  }
  return bias;
}

constexpr bool kS7 = false, kS8 = true;

BiasOf measured(const Recipe& recipe, bool small_ties, Stored stored) {
  const BiasOf bias = bias_of(recipe, small_ties, stored);
  std::printf("  S%d outward %+.4f ulp (t %+.1f), delta kappa %.3f (t %+.1f)\n", small_ties ? 8 : 7,
              bias.outward.mean(), bias.outward.t(), bias.delta.kappa(), bias.delta.t());
  return bias;
}

void expect_unbiased(const Recipe& recipe, bool small_ties, Stored stored = Stored::bf16) {
  const BiasOf bias = measured(recipe, small_ties, stored);
  EXPECT_LE(bias.delta.kappa(), .1) << (small_ties ? "S8" : "S7");
  EXPECT_LE(std::fabs(bias.delta.t()), 4.0) << (small_ties ? "S8" : "S7");
}

void expect_biased(const Recipe& recipe, bool small_ties) {
  EXPECT_GE(measured(recipe, small_ties, Stored::bf16).delta.kappa(), .5);
}

enum class Sum { rounded_p, exact_p };  // what l adds

// FlashAttention: p v accumulated un-rounded, divided by l, rounded once. All keys in one tile.
Recipe flash(Sum l, double beta = 0.0, double limit = Recipe{}.beta_limit) {
  Recipe r = flash_attention(OCTET_BF16);
  r.tile = kAllTokens;
  r.sum_rounded_p = l == Sum::rounded_p;
  r.beta = beta, r.beta_limit = limit;
  return r;
}

// p v rounded to bf16 before it is divided by l: the failing setup of arXiv 2510.04212, there after every 512 keys.
Recipe early(Sum l, double beta = 0.0, double limit = Recipe{}.beta_limit) {
  Recipe r = flash(l, beta, limit);
  r.acc = OCTET_BF16;
  return r;
}
Recipe every_512_keys(Recipe r) {
  r.tile = 512;
  return r;
}

// A maximum that is always m + .5: on tied rows, a shift by beta that reaches no further.
constexpr double kBeta = 2.0, kOffset = .5;

TEST(Bias, s7_early_512) { expect_biased(every_512_keys(early(Sum::exact_p)), kS7); }
TEST(Bias, s7_early_512_beta_2) { expect_unbiased(every_512_keys(early(Sum::exact_p, 2)), kS7); }
TEST(Bias, s7_early_512_beta_7) { expect_unbiased(every_512_keys(early(Sum::exact_p, 7)), kS7); }

TEST(Bias, s7_early) { expect_biased(early(Sum::exact_p), kS7); }
TEST(Bias, s7_early_beta_2) { expect_unbiased(early(Sum::exact_p, 2), kS7); }
TEST(Bias, s7_early_beta_2_l_rounded) { expect_unbiased(early(Sum::rounded_p, 2), kS7); }
TEST(Bias, s7_early_offset) { expect_biased(early(Sum::exact_p, kBeta, kOffset), kS7); }
TEST(Bias, s7_early_offset_l_rounded) { expect_unbiased(early(Sum::rounded_p, kBeta, kOffset), kS7); }

TEST(Bias, s7_flash) { expect_unbiased(flash(Sum::rounded_p), kS7); }
TEST(Bias, s7_flash_offset) { expect_biased(flash(Sum::exact_p, kBeta, kOffset), kS7); }

TEST(Bias, s8_flash) { expect_biased(flash(Sum::rounded_p), kS8); }
TEST(Bias, s8_flash_beta_2) { expect_unbiased(flash(Sum::exact_p, 2), kS8); }
TEST(Bias, s8_flash_beta_2_l_rounded) { expect_biased(flash(Sum::rounded_p, 2), kS8); }

TEST(Bias, s7_s8_exact_delta) {
  for (bool input : {kS7, kS8})
    for (const Stored stored : {Stored::bf16_and_residual, Stored::bf16_and_byte})
      expect_unbiased(flash_attention(OCTET_BF16), input, stored);
}

TEST(Bias, s7_s8_f16_compute) {
  for (bool input : {kS7, kS8})
    for (const Stored stored : {Stored::bf16_and_residual, Stored::bf16_and_byte})
      expect_unbiased(f16_compute(OCTET_BF16), input, stored);
}

TEST(Bias, s7_s8_stochastic_rounding) {
  for (bool input : {kS7, kS8}) expect_unbiased(flash_attention(OCTET_BF16), input, Stored::bf16_stochastic);
}

// A limit of 20 cuts most of what beta 7 asks for, which moves all rows by the same: as biased as a fixed offset.
TEST(Bias, s7_early_beta_7_reach_20) { expect_biased(early(Sum::exact_p, 7, 20.0), kS7); }

// In tiles of 64 keys a tie often spans two tiles. The key of the first was rounded before the maximum moved, so half
// the noise that cures is missing: beta 2 misses the bar by a little, beta 3 holds it.
TEST(Bias, s8_flash_64_beta_2) {
  Recipe recipe = flash(Sum::exact_p, 2);
  recipe.tile = 64;
  const double kappa = measured(recipe, kS8, Stored::bf16).delta.kappa();
  EXPECT_LT(kappa, .5);
  EXPECT_GT(kappa, .1) << "docs/numerics.md says it misses the bar";
}

TEST(Bias, s7_s8_flash_64_beta_3) {
  Recipe recipe = flash(Sum::exact_p, 3.0);
  recipe.tile = 64;
  for (bool input : {kS7, kS8}) expect_unbiased(recipe, input);
}

}  // namespace
}  // namespace octet::reference
