// Sinks and the gradient of lse agree with other calls that have the same results.
#include <algorithm>
#include <cmath>
#include <limits>

#include "laws/laws.h"

namespace octet::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

constexpr Case kCase{.name = "sinks",
                     .batch = 2,
                     .heads = 3,
                     .kv_heads = 3,
                     .tokens_q = 90,
                     .tokens_k = 150,
                     .sinks = Sinks::shared,
                     .dlse = true};

// kCase's inputs without what a pass would reject.
Inputs without_sinks(Inputs in) {
  in.sinks = in.tsinks = Values();
  return in;
}

class SinksForward : public EveryForward {};

// Nothing is rounded against a sink: it multiplies o by e^(lse of the keys - lse), and lse is log(e^lse + e^sink), to
// the rounding of float32, whatever the precision. Each second query has all its logits alike, for bias correction
// beta.
TEST_P(SinksForward, multiply_o_by_the_share_of_the_keys) {
  Inputs in = draw(kCase, 1);
  for_each(in.q.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
    if (t % 2) in.q.at(b, h, t, c) = 0.0;
  });
  const Inputs plain = without_sinks(in);
  const bool sixteen = GetParam() == Precision::f16 || GetParam() == Precision::bf16;
  for (const char* backend : {"cpu", "reference"})
    for (const BiasCorrection bias_correction : {BiasCorrection::f16, BiasCorrection::beta}) {
      if (bias_correction == BiasCorrection::beta && !sixteen) continue;
      SCOPED_TRACE(testing::Message() << backend << (bias_correction == BiasCorrection::beta ? ", beta" : ""));
      Attention attention = attention_of(kCase, GetParam(), backend);
      attention.bias_correction = bias_correction;
      const Outputs alone = run(kCase, plain, attention, Pass::forward), got = run(kCase, in, attention, Pass::forward);
      Values o(alone.o.shape), lse(alone.lse.shape);
      for_each(o.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
        const double keys = alone.lse.at(b, h, t, 0), sink = in.sinks.at(0, h, 0, 0);
        const double both = lse.at(b, h, t, 0) = std::max(keys, sink) + std::log1p(std::exp(-std::fabs(keys - sink)));
        o.at(b, h, t, c) = std::exp(keys - both) * alone.o.at(b, h, t, c);
      });
      const double u = 0x1p-24, size = std::max(largest(alone.lse), largest(lse));
      expect_near(got.lse, lse, 3 * u * size, "lse");
      expect_near(got.o, o, largest(alone.o) * 3 * u * (1 + size), "o");
      EXPECT_GT(difference(got.o, alone.o).relative(), .1) << "the sinks did nothing";
      // A sink of -inf is none.
      const auto last = [](const Values& x) { return slice(x, 1, kCase.heads - 1, kCase.heads); };
      expect_same_bits(last(got.o), last(alone.o), "o of the head whose sink is -inf");
      expect_same_bits(last(got.lse), last(alone.lse), "lse of the head whose sink is -inf");
    }
}

// o is the same whether lse is asked for or not: where k is smoothed, sinks need the logits in the caller's terms.
TEST_P(SinksForward, do_not_need_lse) {
  const Inputs in = draw(kCase, 9);
  const Buffer q(in.q, DType::f32), k(in.k, DType::f32), v(in.v, DType::f32), sinks(in.sinks, DType::f32);
  const Buffer o(DType::f32, kCase.o_shape());
  octet::run(attention_of(kCase, GetParam(), "cpu"),
             Forward{.q = q.view(), .k = k.view(), .v = v.view(), .o = o.view(), .extras = {.sinks = sinks.view()}});
  expect_same_bits(o.values(), forward(kCase, in, GetParam()).o, "o");
}

TEST_P(SinksForward, that_are_not_numbers_make_their_heads_nan) {
  for (const double sink : {kInf, std::numeric_limits<double>::quiet_NaN()}) {
    Inputs in = draw(kCase, 2);
    in.sinks.at(0, 1, 0, 0) = sink;
    const Outputs got = forward(kCase, in, GetParam());
    for_each(got.o.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
      EXPECT_EQ(std::isnan(got.o.at(b, h, t, c)), h == 1);
      EXPECT_EQ(std::isnan(got.lse.at(b, h, t, 0)), h == 1);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Precisions, SinksForward, testing::ValuesIn(precisions_of(Pass::forward)),
                         [](const auto& info) { return std::string(name(info.param)); });

class SinksOf : public EveryRecipe {};

// A sink is one more key of zeros whose value is 0, with a mask that adds the sink to its logit of 0.
TEST_P(SinksOf, one_more_key_without_a_value) {
  const Recipe recipe = GetParam();
  Case c = kCase;
  c.batch = 1;
  Inputs in = draw(c, 3);
  in.sinks.at(0, c.heads - 1, 0, 0) = 4.5;  // a mask of -inf would be no key at all
  in.tsinks = Values(in.tsinks.shape);      // nor has a mask a tangent
  Case longer = c;
  ++longer.tokens_k, longer.sinks = Sinks::none;
  Inputs other = without_sinks(in);
  const auto append = [](Values& x) { x = joined({x, Values({x.shape[0], x.shape[1], 1, x.shape[3]})}, 2); };
  for (Values* x : {&other.k, &other.v, &other.tk, &other.tv}) append(*x);
  other.mask = Values({1, c.heads, 1, longer.tokens_k}), other.mask_dtype = DType::f32;
  for (int64_t h = 0; h < c.heads; ++h) other.mask.at(0, h, 0, c.tokens_k) = in.sinks.at(0, h, 0, 0);

  const Outputs got = compute(c, in, recipe), want = compute(longer, other, recipe);
  const Allowed allowed(c, in, recipe), allowed_of_key(longer, other, recipe);
  const auto expect_like = [&](Values Outputs::*output, const char* what) {
    const Values& values = want.*output;
    const bool of_keys = values.shape[2] == longer.tokens_k;
    expect_near(got.*output, of_keys ? slice(values, 2, 0, c.tokens_k) : values,
                allowed(output) + allowed_of_key(output), what);
  };
  if (recipe.pass != Pass::backward) expect_like(&Outputs::o, "o"), expect_like(&Outputs::lse, "lse");
  if (recipe.pass == Pass::backward)
    expect_like(&Outputs::dq, "dq"), expect_like(&Outputs::dk, "dk"), expect_like(&Outputs::dv, "dv");
  if (recipe.pass == Pass::jvp) expect_like(&Outputs::to, "to"), expect_like(&Outputs::tlse, "tlse");
}

INSTANTIATE_TEST_SUITE_P(Recipes, SinksOf, testing::ValuesIn(every_recipe()), label);

constexpr Recipe kBackward{Pass::backward, Precision::f32};

// ds = p (do v^T - do o + dlse): dlse = do a is what values that lie a higher do to a backward pass whose o has not
// heard of it.
TEST(Dlse, shifts_dp) {
  Case c = kCase;
  c.sinks = Sinks::none;
  Inputs in = without_sinks(draw(c, 4)), shifted = in;
  const Values a = normal({1, 1, 1, c.dim_v}, 5);
  in.dlse = Values(c.lse_shape()), shifted.dlse = in.dlse;
  for_each(in.do_.shape, [&](int64_t b, int64_t h, int64_t t, int64_t i) {
    in.dlse.at(b, h, t, 0) += in.do_.at(b, h, t, i) * a.at(0, 0, 0, i);
  });
  in.dlse = rounded(in.dlse, DType::f32);
  for_each(in.v.shape,
           [&](int64_t b, int64_t h, int64_t t, int64_t i) { shifted.v.at(b, h, t, i) += a.at(0, 0, 0, i); });
  shifted.v = rounded(shifted.v, DType::f32);
  const Attention attention = attention_of(c, Precision::f32, "cpu");
  const Outputs saved = run(c, in, attention, Pass::forward);
  const Outputs got = run(c, in, attention, Pass::backward, &saved),
                want = run(c, shifted, attention, Pass::backward, &saved);
  // dlse and v + a are rounded, by half a unit each.
  Noise noise = f32_noise(c, in, largest_column_sum(c, in), 5.0);
  const Noise other = f32_noise(c, shifted, largest_column_sum(c, in), 5.0);
  expect_near(got.dq, want.dq, noise.dq + other.dq, "dq");
  expect_near(got.dk, want.dk, noise.dk + other.dk, "dk");
  EXPECT_GT(largest(want.dq), 10 * (noise.dq + other.dq)) << "the bound has no power";
}

// The gradient of lse alone is p: dq = scale dlse p k, dk = scale p^T (dlse q), dv = 0, dsinks = sum dlse exp(sink -
// lse).
TEST(Dlse, alone_gives_the_probabilities) {
  Inputs in = draw(kCase, 6);
  in.do_ = Values(in.do_.shape);
  const Outputs got = compute(kCase, in, kBackward);
  Values dsinks(kCase.sinks_shape());
  for_each(in.dlse.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
    dsinks.at(0, h, 0, 0) += in.dlse.at(b, h, t, c) * std::exp(in.sinks.at(0, h, 0, 0) - got.lse.at(b, h, t, c));
  });
  expect_near(got.dsinks, dsinks, f32_noise(kCase, in, largest_column_sum(kCase, in), 5.0).dsinks, "dsinks");
  EXPECT_EQ(got.dsinks.at(0, kCase.heads - 1, 0, 0), 0.0) << "the sink of -inf";
  EXPECT_EQ(largest(got.dv), 0.0);
  // All dlse alike: dk is that of do = 1 against v = 0, q in the place of do.
  Inputs ones = in;
  ones.dlse = Values(in.dlse.shape, 1.0);
  Inputs as_values = in;
  as_values.do_ = in.q;
  Case c = kCase;
  c.dim_v = c.dim;
  as_values.v = Values(c.v_shape());
  const Values dk = compute(kCase, ones, kBackward).dk, dv = compute(c, as_values, kBackward).dv;
  const double column_sum = largest_column_sum(kCase, in);
  expect_near(dk, combined(kCase.effective_scale(), dv, 0, dv),
              f32_noise(kCase, ones, column_sum, 5.0).dk +
                  kCase.effective_scale() * f32_noise(c, as_values, column_sum, 5.0).dv,
              "dk");
}

// A sink that the batch shares gets the sum of what each batch element gives it, whichever tensor holds it.
TEST(Dsinks, of_a_shared_sink_sum_over_the_batch) {
  for (const Precision precision : precisions_of(Pass::backward)) {
    const Inputs in = draw(kCase, 7);
    Case each = kCase;
    each.sinks = Sinks::of_batch;
    Inputs repeated = in;
    repeated.sinks = joined({in.sinks, in.sinks}, 0), repeated.tsinks = joined({in.tsinks, in.tsinks}, 0);
    const Outputs shared = compute(kCase, in, {Pass::backward, precision}),
                  apart = compute(each, repeated, {Pass::backward, precision});
    expect_same_bits(shared.dq, apart.dq, "dq");
    const Values sum = combined(1, slice(apart.dsinks, 0, 0, 1), 1, slice(apart.dsinks, 0, 1, 2));
    expect_near(shared.dsinks, sum, 0x1p-23 * 2 * largest(apart.dsinks), name(precision));
  }
}

// The projection takes a wrong delta, here from an o that is a quarter too large, out of the gradients of the sinks
// too.
TEST(Dsinks, are_projected) {
  const Inputs in = draw(kCase, 10);
  for (const BiasCorrection bias_correction : {BiasCorrection::none, BiasCorrection::gproj}) {
    Attention attention = attention_of(kCase, Precision::bf16, "cpu");
    attention.bias_correction = bias_correction;
    Outputs saved = run(kCase, in, attention, Pass::forward);
    const Values want = run(kCase, in, attention, Pass::backward, &saved).dsinks;
    saved.o = combined(1.25, saved.o, 0, saved.o);
    const double moved = difference(run(kCase, in, attention, Pass::backward, &saved).dsinks, want).relative();
    if (bias_correction == BiasCorrection::gproj)
      EXPECT_LT(moved, 0x1p-8);
    else
      EXPECT_GT(moved, 0x1p-4);
  }
}

// A row that sees nothing but a sink gives it its dlse, and nothing to q, k and v.
TEST(Dsinks, of_blind_rows_are_dlse) {
  Case c = kCase;
  c.tokens_k = 0;
  for (const Precision precision : precisions_of(Pass::backward)) {
    Inputs in = draw(c, 8);
    const Outputs got = compute(c, in, {Pass::backward, precision});
    for (int64_t h = 0; h < c.heads; ++h) {
      double sum = 0.0, magnitude = 0.0;
      for (int64_t b = 0; b < c.batch; ++b)
        for (int64_t t = 0; t < c.tokens_q; ++t)
          sum += in.dlse.at(b, h, t, 0), magnitude += std::fabs(in.dlse.at(b, h, t, 0));
      EXPECT_NEAR(got.dsinks.at(0, h, 0, 0), h == c.heads - 1 ? 0.0 : sum, 0x1p-23 * magnitude) << name(precision);
      EXPECT_EQ(got.lse.at(0, h, 0, 0), in.sinks.at(0, h, 0, 0)) << name(precision);
    }
    EXPECT_EQ(largest(got.dq), 0.0) << name(precision);
  }
}

}  // namespace
}  // namespace octet::test
