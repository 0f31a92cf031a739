// What a softcap and ALiBi do, told by other calls.
#include <cmath>
#include <limits>

#include "laws/laws.h"

namespace octet::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();

const Case kCase{.name = "softcap_alibi",
                 .heads = 2,
                 .kv_heads = 1,
                 .tokens_q = 70,
                 .tokens_k = 150,
                 .causal = true,
                 .alignment = Alignment::bottom_right};

// The outputs of two calls that a law makes equal.
void expect_alike(const Case& a, const Inputs& in_a, const Case& b, const Inputs& in_b, const Recipe& recipe) {
  const Outputs got = compute(a, in_a, recipe), want = compute(b, in_b, recipe);
  const Allowed of_a(a, in_a, recipe), of_b(b, in_b, recipe);
  const auto expect = [&](Values Outputs::*output, const char* what) {
    expect_near(got.*output, want.*output, of_a(output) + of_b(output), what);
  };
  if (recipe.pass != Pass::backward) expect(&Outputs::o, "o"), expect(&Outputs::lse, "lse");
  if (recipe.pass == Pass::backward) expect(&Outputs::dq, "dq"), expect(&Outputs::dk, "dk"), expect(&Outputs::dv, "dv");
  if (recipe.pass == Pass::jvp) expect(&Outputs::to, "to");
}

class SoftcapAlibi : public EveryRecipe {};

TEST_P(SoftcapAlibi, a_cap_far_above_all_logits_is_none) {
  const Inputs in = draw(kCase, 1);
  for (const float softcap : {0x1p20f, std::numeric_limits<float>::max()}) {
    Case capped = kCase;
    capped.softcap = softcap;
    expect_alike(capped, in, kCase, in, GetParam());
  }
}

TEST_P(SoftcapAlibi, slopes_of_zero_are_none) {
  Case c = kCase;
  c.alibi = Alibi::each;
  const Inputs in = draw(kCase, 2);
  Inputs flat = in;
  flat.alibi_slopes = Values(c.slopes_shape());
  expect_alike(c, flat, kCase, in, GetParam());
}

// A mask tensor of -slope * distance, which the distance of the last query from the last key is 0 in.
TEST_P(SoftcapAlibi, slopes_are_a_mask_tensor_of_distances) {
  for (const float softcap : {0.f, 2.f}) {
    Case c = kCase;
    c.alibi = Alibi::each, c.softcap = softcap;
    const Inputs in = draw(c, 3);
    Inputs masked = in;
    masked.alibi_slopes = Values();
    masked.mask = Values({c.batch, c.heads, c.tokens_q, c.tokens_k}), masked.mask_dtype = DType::f32;
    for_each(masked.mask.shape, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
      const auto distance = static_cast<double>(std::abs(i + c.tokens_k - c.tokens_q - j));
      masked.mask.at(b, h, i, j) = -in.alibi_slopes.at(b, h, 0, 0) * distance;
    });
    masked.mask = rounded(masked.mask, DType::f32);
    Case of_mask = c;
    of_mask.alibi = Alibi::none;
    expect_alike(c, in, of_mask, masked, GetParam());
  }
}

// A mean that all keys share moves logits by as much, which a softcap does not let pass: recipes that take it from k
// have to give it back to the logits, and to dq.
TEST_P(SoftcapAlibi, a_cap_sees_the_mean_that_smoothing_takes_from_k) {
  Case c = kCase;
  c.softcap = 2.f;
  Inputs in = draw(c, 4);
  const Values shift = normal({1, 1, 1, c.dim}, 5);
  for_each(in.k.shape,
           [&](int64_t b, int64_t h, int64_t t, int64_t i) { in.k.at(b, h, t, i) += 2 * shift.at(0, 0, 0, i); });
  in.k = rounded(in.k, c.dtype);
  const Recipe recipe = GetParam();
  const Outputs got = compute(c, in, recipe), want = exact(c, in, recipe.pass);
  const Allowed allowed(c, in, recipe);
  const auto expect = [&](Values Outputs::*output, const char* what) {
    expect_near(got.*output, want.*output, allowed(output), what);
  };
  if (recipe.pass != Pass::backward) expect(&Outputs::o, "o"), expect(&Outputs::lse, "lse");
  if (recipe.pass == Pass::backward) expect(&Outputs::dq, "dq"), expect(&Outputs::dk, "dk"), expect(&Outputs::dv, "dv");
}

INSTANTIATE_TEST_SUITE_P(Recipes, SoftcapAlibi, testing::ValuesIn(every_recipe()), label);

constexpr Recipe kForward{Pass::forward, Precision::f32};

// Distances are counted from the last query and key: the last queries alone have the same.
TEST(Alibi, of_the_last_queries_alone_is_theirs) {
  Case c = kCase, last = kCase;
  c.alibi = last.alibi = Alibi::shared, last.tokens_q = 20;
  const Inputs in = draw(c, 6);
  Inputs part = in;
  part.q = slice(in.q, 2, c.tokens_q - last.tokens_q, c.tokens_q);
  part.do_ = slice(in.do_, 2, c.tokens_q - last.tokens_q, c.tokens_q);
  const Outputs all = compute(c, in, kForward), own = compute(last, part, kForward);
  const double bound = 2 * f32_noise(c, in, 0.0, 5.0).o;
  expect_near(own.o, slice(all.o, 2, c.tokens_q - last.tokens_q, c.tokens_q), bound, "o");
}

// Slopes so steep that a term common to the row would take all bits of the logits.
TEST(Alibi, far_from_the_diagonal_keeps_the_bits_of_the_logits) {
  for (const double slope : {-1000.0, 1000.0}) {
    Case c{.name = "steep", .tokens_q = 400, .tokens_k = 70, .alibi = Alibi::shared};
    Inputs in = draw(c, 7);
    in.alibi_slopes.at(0, 0, 0, 0) = slope;
    // Rows are what one key has, but where a steep slope meets its two ends.
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const Outputs got = compute(c, in, {pass, Precision::f32}), want = exact(c, in, pass);
      Inputs flat = in;
      flat.alibi_slopes = Values(in.alibi_slopes.shape);
      const Noise noise = f32_noise(c, flat, largest_column_sum(c, in), 5.0);
      if (pass == Pass::forward) expect_near(got.o, want.o, noise.o, "o");
      if (pass == Pass::backward)
        expect_near(got.dq, want.dq, noise.dq, "dq"), expect_near(got.dv, want.dv, noise.dv, "dv");
    }
  }
}

TEST(Alibi, slopes_that_are_not_finite_make_their_heads_nan) {
  for (const Precision precision : precisions_of(Pass::forward))
    for (const double slope : {kInf, -kInf, kNaN}) {
      Case c = kCase;
      c.alibi = Alibi::shared;
      const Inputs in = draw(c, 8);
      Inputs spoilt = in;
      spoilt.alibi_slopes.at(0, 1, 0, 0) = slope;
      for (const char* backend : {"cpu", "reference"}) {
        const Outputs want = compute(c, in, {Pass::forward, precision}, 0, backend),
                      got = compute(c, spoilt, {Pass::forward, precision}, 0, backend);
        for_each(got.o.shape, [&](int64_t b, int64_t h, int64_t t, int64_t e) {
          if (h == 1)
            EXPECT_TRUE(std::isnan(got.o.at(b, h, t, e)) && std::isnan(got.lse.at(b, h, t, 0))) << backend;
          else
            EXPECT_EQ(got.o.at(b, h, t, e), want.o.at(b, h, t, e)) << backend;
        });
      }
    }
}

// Not c: that would hide that a model has diverged.
TEST(Softcap, a_query_with_an_infinity_is_nan_and_no_other) {
  for (const Precision precision : precisions_of(Pass::forward)) {
    if (precision == Precision::fp8_raw) continue;  // its casts saturate
    Case c = kCase;
    c.softcap = 2.f;
    Inputs in = draw(c, 9);
    in.q.at(0, 1, 30, 5) = kInf;
    for (const char* backend : {"cpu", "reference"}) {
      const Outputs got = compute(c, in, {Pass::forward, precision}, 0, backend);
      for_each(got.o.shape, [&](int64_t b, int64_t h, int64_t t, int64_t e) {
        EXPECT_EQ(std::isnan(got.o.at(b, h, t, e)), h == 1 && t == 30) << backend << ' ' << name(precision);
      });
    }
  }
}

}  // namespace
}  // namespace octet::test
