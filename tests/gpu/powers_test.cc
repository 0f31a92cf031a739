// What the backward pass multiplies by powers of two: numbers that a sample of the tokens does not show, and numbers
// that are not finite.
#include <gtest/gtest.h>

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
