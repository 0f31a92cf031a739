// What the backward pass multiplies by powers of two: numbers that a sample of the tokens does not show, and numbers
// that are not finite.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "gpu/place.h"
#include "support/cases.h"

namespace octet::test {
namespace {

// Many more tokens than a sample takes, so that most lie between those it takes.
Case many_tokens(float scale, int64_t dim = 64) {
  return {.name = "many_tokens",
          .heads = 2,
          .kv_heads = 1,
          .tokens_q = 700,
          .tokens_k = 900,
          .dim = dim,
          .dim_v = dim,
          .scale = scale,
          .dtype = DType::bf16,
          .out_dtype = DType::bf16};
}

Attention on_gpu(const Case& c, BiasCorrection bias_correction, bool deterministic) {
  Attention a = attention_of(c, Precision::bf16, gpu_backend());
  a.bias_correction = bias_correction, a.deterministic = deterministic;
  return a;
}

// Operands in f16 have powers of two; bf16 has the units of integers.
constexpr BiasCorrection kOperandsIn[] = {BiasCorrection::f16, BiasCorrection::exact_delta};

struct Hidden {
  const char* name;
  Values Inputs::*tensor;
  double at_token_1, elsewhere;  // its numbers are multiplied by
  float scale;
  int64_t dim = 64;
};
constexpr Hidden kHidden[] = {{"large_q", &Inputs::q, 0x1p12, 1, .125f * 0x1p-12f},
                              {"large_k", &Inputs::k, 0x1p12, 1, .125f * 0x1p-12f},
                              {"large_v", &Inputs::v, 0x1p12, 1, .125f},
                              {"large_do", &Inputs::do_, 0x1p12, 1, .125f},
                              {"huge_k", &Inputs::k, 0x1p40, 1, .125f * 0x1p-40f, 128},
                              {"huge_v", &Inputs::v, 0x1p30, 1, .125f, 128},
                              {"tiny_k", &Inputs::k, 0x1p-80, 0x1p-80, .125f * 0x1p80f},
                              {"tiny_k_but_one", &Inputs::k, 1, 0x1p-80, .125f, 128},
                              {"tiny_do_alone", &Inputs::do_, 0x1p-40, 0, .125f},
                              {"large_v_alone", &Inputs::v, 0x1p20, 0, .125f}};

class GpuHidden : public testing::TestWithParam<std::tuple<Hidden, BiasCorrection>> {};

TEST_P(GpuHidden, numbers_are_found) {
  const auto& [hidden, bias_correction] = GetParam();
  const Case c = many_tokens(hidden.scale, hidden.dim);
  Inputs in = draw(c, 3);
  Values& x = in.*hidden.tensor;
  for_each(x.shape, [&](int64_t b, int64_t h, int64_t t, int64_t channel) {
    x.at(b, h, t, channel) *= t == 1 ? hidden.at_token_1 : hidden.elsewhere;
  });
  Attention plain = attention_of(c, Precision::bf16, "reference");
  plain.bias_correction = bias_correction;
  const Outputs want = exact(c, in, Pass::backward), saved = run(c, in, plain, Pass::forward);
  const Outputs expected = run(c, in, plain, Pass::backward, &saved);
  const Noise noise = f32_noise(c, in, largest_column_sum(c, in), 1.0);
  for (const bool deterministic : {false, true}) {
    GpuPlace place;
    const Outputs got = run(c, in, on_gpu(c, bias_correction, deterministic), Pass::backward, &saved, &place);
    for (const auto& [name, g, e, w, f32] : {std::tuple{"dq", &got.dq, &expected.dq, &want.dq, noise.dq},
                                             {"dk", &got.dk, &expected.dk, &want.dk, noise.dk},
                                             {"dv", &got.dv, &expected.dv, &want.dv, noise.dv}})
      EXPECT_LE(difference(*g, *w).rms, 2 * difference(*e, *w).rms + f32)
          << name << ", deterministic " << deterministic << ": " << text(difference(*g, *w));
  }
}

INSTANTIATE_TEST_SUITE_P(Tensors, GpuHidden,
                         testing::Combine(testing::ValuesIn(kHidden), testing::ValuesIn(kOperandsIn)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + suffix_of(std::get<1>(info.param));
                         });

// Where numbers are not finite: how many there are, and the first and the last of their rows.
std::string nonfinite(const Values& x) {
  int64_t count = 0;
  std::string first, last;
  for_each(x.shape, [&](int64_t b, int64_t h, int64_t t, int64_t channel) {
    if (std::isfinite(x.at(b, h, t, channel))) return;
    last = "[" + std::to_string(b) + ", " + std::to_string(h) + ", " + std::to_string(t) + ", " +
           std::to_string(channel) + "] = " + std::to_string(x.at(b, h, t, channel));
    if (!count++) first = last;
  });
  return count ? std::to_string(count) + " numbers, from " + first + " to " + last : "";
}

// Large logits, of which float32 lacks digits: P from lse may exceed 1 by much, and what takes digits from k costs them
// many. Gradients stay finite. That of v errs as P does, which float32 makes err by at most 2^e: a product of q and k
// is the sum of dim products in steps of 16, forward and backward, and lse and the argument of exp are rounded. (In
// operands of bf16 P has the range of float32.) Logits stay below 2^24 in base 2, where float32 still tells whole
// numbers apart: beyond, the forward pass, which multiplies by the scale and subtracts the maximum in one operation,
// misses a maximum by more than 1, and 2^15 P is inf in f16.
class GpuLargeLogits : public testing::TestWithParam<std::tuple<double, int64_t, BiasCorrection>> {};

TEST_P(GpuLargeLogits, leave_gradients_finite) {
  const auto [size, dim, bias_correction] = GetParam();
  Case c = many_tokens(static_cast<float>(1 / std::sqrt(static_cast<double>(dim))), dim);
  c.kv_heads = 2, c.tokens_q = 70, c.tokens_k = 90;
  Inputs in = draw(c, static_cast<uint64_t>(size));
  for (Values* x : {&in.q, &in.k}) *x = rounded(combined(size, *x, 0, *x), c.dtype);
  double most = 0.0, largest_logit = 0.0;
  for (int64_t h = 0; h < c.heads; ++h)
    for (int64_t i = 0; i < c.tokens_q; ++i)
      for (int64_t j = 0; j < c.tokens_k; ++j) {
        double logit = 0.0, sum = 0.0;
        for (int64_t channel = 0; channel < dim; ++channel) {
          const double product = in.q.at(0, h, i, channel) * in.k.at(0, h, j, channel);
          logit += product, sum += std::fabs(product);
        }
        most = std::max(most, c.effective_scale() * sum);
        largest_logit = std::max(largest_logit, std::fabs(c.effective_scale() * logit));
      }
  ASSERT_LT(largest_logit * 1.44269504, 0x1p24);
  const double e = (2 * (static_cast<double>(dim) / 16 + 1) + 3) * 0x1p-23 * most;
  Attention plain = attention_of(c, Precision::bf16, "reference");
  plain.bias_correction = bias_correction;
  const Outputs want = exact(c, in, Pass::backward), saved_plainly = run(c, in, plain, Pass::forward);
  const Outputs expected = run(c, in, plain, Pass::backward, &saved_plainly);
  Inputs positive = in;
  for (double& x : positive.do_.data) x = std::fabs(x);
  const Values dv_of_magnitudes = exact(c, positive, Pass::backward).dv;
  for (const bool deterministic : {false, true}) {
    GpuPlace forward, backward;
    const Attention gpu = on_gpu(c, bias_correction, deterministic);
    const Outputs saved = run(c, in, gpu, Pass::forward, nullptr, &forward);
    const Outputs got = run(c, in, gpu, Pass::backward, &saved, &backward);
    for (const auto& [name, x] : {std::pair{"dq", &got.dq}, {"dk", &got.dk}, {"dv", &got.dv}})
      EXPECT_EQ(nonfinite(*x), "") << name << ", deterministic " << deterministic;
    if (e > 1) continue;  // any P is possible
    double square = 0.0;
    for (const double x : dv_of_magnitudes.data) square += x * x;
    const double rms = std::sqrt(square / static_cast<double>(dv_of_magnitudes.data.size()));
    EXPECT_LE(difference(got.dv, want.dv).rms, 2 * difference(expected.dv, want.dv).rms + std::expm1(e) * rms)
        << "deterministic " << deterministic << ", float32 errs by " << e;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, GpuLargeLogits,
                         testing::Combine(testing::Values(1.0, 16.0, 60.0, 250.0, 1e3),
                                          testing::Values(64, 96, 128, 256), testing::ValuesIn(kOperandsIn)),
                         [](const auto& info) {
                           return "of_" + std::to_string(static_cast<int>(std::get<0>(info.param))) + "_dim_" +
                                  std::to_string(std::get<1>(info.param)) + suffix_of(std::get<2>(info.param));
                         });

// A query whose do has a number that is not finite gets a dq of such numbers, also where dq is summed as integers, and
// the others' dq is as without it.
TEST(GpuNonFinite, StaysInItsQuery) {
  const Case c = many_tokens(.125f);
  const Inputs in = draw(c, 4);
  const Outputs saved = run(c, in, attention_of(c, Precision::bf16, "reference"), Pass::forward);
  for (const BiasCorrection bias_correction : kOperandsIn)
    for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()})
      for (const bool deterministic : {false, true}) {
        SCOPED_TRACE(testing::Message() << bad << suffix_of(bias_correction) << ", deterministic " << deterministic);
        Inputs spoiled = in;
        spoiled.do_.at(0, 1, 77, 5) = bad;
        GpuPlace first, second;
        const Attention gpu = on_gpu(c, bias_correction, deterministic);
        const Outputs want = run(c, in, gpu, Pass::backward, &saved, &first);
        const Outputs got = run(c, spoiled, gpu, Pass::backward, &saved, &second);
        for_each(c.q_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t channel) {
          const double x = got.dq.at(b, h, t, channel);
          if (h == 1 && t == 77)
            ASSERT_FALSE(std::isfinite(x)) << channel;
          else
            ASSERT_NEAR(x, want.dq.at(b, h, t, channel), 0x1p-7 * std::fabs(x) + 1e-6)
                << h << ' ' << t << ' ' << channel;
        });
      }
}

}  // namespace
}  // namespace octet::test
