// Numbers that leave the range of the formats inside the kernels.
#include <gtest/gtest.h>

#include <cmath>
#include <iterator>
#include <octet/formats.hpp>

#include "gpu/place.h"
#include "support/cases.h"

namespace octet::test {
namespace {

struct Rise {
  const char* name;
  double logits;  // from the last key to the first
  Precision precision;
  int64_t dim;
  bool causal;
};
const std::vector<Rise> kRises =
    gpu_kinds<Rise>(Pass::forward, {{"slowly", 4, Precision::bf16, 128, false},
                                    {"beyond_weights", 60, Precision::bf16, 128, false},
                                    {"beyond_weights_causal", 60, Precision::bf16, 64, true},
                                    {"beyond_exp", 2000, Precision::bf16, 128, true},
                                    {"beyond_exp_dim_256", 2000, Precision::bf16, 256, false},
                                    {"beyond_f16_weights", 60, Precision::f16, 64, false},
                                    {"beyond_exp_f16", 2000, Precision::f16, 128, true},
                                    {"slowly_fp8", 4, Precision::fp8, 128, false},
                                    {"beyond_codes_fp8", 60, Precision::fp8, 128, false},
                                    {"beyond_codes_fp8_raw", 60, Precision::fp8_raw, 64, true},
                                    {"beyond_codes_int8_fp8", 60, Precision::int8_fp8, 64, false},
                                    {"beyond_exp_int8_fp8", 2000, Precision::int8_fp8, 128, true},
                                    {"beyond_exp_int8", 2000, Precision::int8, 128, true},
                                    {"beyond_exp_sagebwd", 2000, Precision::sagebwd, 128, true},
                                    {"slowly_int8_f16", 4, Precision::int8_f16, 64, false},
                                    {"beyond_weights_int8_f16", 60, Precision::int8_f16, 128, false},
                                    {"beyond_exp_int8_f16", 2000, Precision::int8_f16, 128, true},
                                    {"beyond_exp_int8_f16_dim_256", 2000, Precision::int8_f16, 256, false}});

// The forward kernels keep an old maximum while weights over it fit; here logits rise from tile to tile, in the order
// in which tiles come (last keys first), by little, beyond what weights hold and beyond what exp holds.
class GpuRising : public testing::TestWithParam<Rise> {};

TEST_P(GpuRising, logits_give_what_float64_gives) {
  const Rise& rise = GetParam();
  constexpr int64_t kTokens = 700;
  for (const DType out : {DType::bf16, DType::f32}) {  // f32: with f16 weights
    const Case c{.name = rise.name,
                 .heads = 2,
                 .tokens_q = kTokens,
                 .tokens_k = kTokens,
                 .dim = rise.dim,
                 .dim_v = rise.dim,
                 .causal = rise.causal,
                 .scale = .0625f,
                 .dtype = DType::bf16,
                 .out_dtype = out};
    Inputs in = draw(c, 1);
    // One channel of q is 16 and adds the key's rank to the logits; powers of two, so that bf16 holds the steps.
    for (int64_t i = 0; i < 2 * kTokens; ++i) in.q.data[static_cast<size_t>(i * rise.dim)] = 16.0;
    for (int64_t j = 0; j < kTokens; ++j)
      in.k.data[static_cast<size_t>(j * rise.dim)] =
          round_to(kBf16, rise.logits * static_cast<double>(kTokens - 1 - j) / kTokens);
    const Outputs want = exact(c, in, Pass::forward);
    const Outputs plain = run(c, in, attention_of(c, rise.precision, "reference"), Pass::forward);
    GpuPlace place;
    const Outputs got = run(c, in, attention_of(c, rise.precision, gpu_backend()), Pass::forward, nullptr, &place);
    const Noise noise = f32_noise(c, in, 0.0, 5.0);
    for (const auto& [name, g, p, w, f32] :
         {std::tuple{"o", &got.o, &plain.o, &want.o, noise.o}, {"lse", &got.lse, &plain.lse, &want.lse, noise.lse}}) {
      const double error = difference(*g, *w).largest;
      EXPECT_LE(error, 2 * difference(*p, *w).largest + f32) << name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rises, GpuRising, testing::ValuesIn(kRises),
                         [](const auto& info) { return std::string(info.param.name); });

// With f16 weights v is converted to f16, which holds neither 2^-30 nor 2^20. Each head has a magnitude of its own, and
// one token, which no sample of a head contains, may be larger. Kernels with few queries do not convert v themselves.
class GpuMagnitudes : public testing::TestWithParam<std::tuple<Precision, int64_t, int>> {};

TEST_P(GpuMagnitudes, of_v_change_nothing_but_the_scale_of_o) {
  const auto [precision, tokens_q, hidden] = GetParam();
  constexpr int kExponents[] = {0, -30, 20, -3, 15, 90, -90};
  constexpr int64_t kHiddenToken = 1;
  const Case c{.name = "magnitudes",
               .heads = std::size(kExponents),
               .kv_heads = std::size(kExponents),
               .tokens_q = tokens_q,
               .tokens_k = 300,
               .dim = 72,
               .dim_v = 72,
               .dtype = DType::bf16,
               .out_dtype = DType::f32};
  Inputs in = draw(c, 5);
  for_each(in.v.shape, [&](int64_t b, int64_t h, int64_t t, int64_t channel) {  // half of the channels with an offset
    double& x = in.v.at(b, h, t, channel);
    x = round_to(kBf16, std::ldexp(x + channel % 2 * 4.0, t == kHiddenToken ? hidden : 0));
  });
  const auto times_powers = [&](Values& x, int sign) {
    for_each(x.shape, [&](int64_t b, int64_t h, int64_t t, int64_t s) {
      x.at(b, h, t, s) = std::ldexp(x.at(b, h, t, s), sign * kExponents[h]);
    });
  };
  const Outputs want = exact(c, in, Pass::forward);
  const Outputs plain = run(c, in, attention_of(c, precision, "reference"), Pass::forward);
  const Noise noise = f32_noise(c, in, 0.0, 5.0);
  times_powers(in.v, 1);
  GpuPlace place;
  Outputs got = run(c, in, attention_of(c, precision, gpu_backend()), Pass::forward, nullptr, &place);
  times_powers(got.o, -1);
  EXPECT_LE(difference(got.o, want.o).largest, 2 * difference(plain.o, want.o).largest + noise.o)
      << text(difference(got.o, want.o));
}

INSTANTIATE_TEST_SUITE_P(Precisions, GpuMagnitudes,
                         testing::Combine(testing::Values(Precision::bf16, Precision::int8_f16),
                                          testing::Values(150, 300), testing::Values(0, 20)),
                         [](const auto& info) {
                           return std::string(name(std::get<0>(info.param))) + '_' +
                                  std::to_string(std::get<1>(info.param)) + "_queries" +
                                  (std::get<2>(info.param) ? "_hidden" : "");
                         });

// With f16 weights v comes less a vector, which o gets back.
const Case kCentered{.name = "centered",
                     .heads = 4,
                     .kv_heads = 2,
                     .tokens_q = 800,
                     .tokens_k = 700,
                     .causal = true,
                     .alignment = Alignment::bottom_right,
                     .dtype = DType::bf16,
                     .out_dtype = DType::bf16};

// What all tokens share comes back exactly, and queries that see no key get 0.
TEST(GpuCenteredValues, that_are_all_the_same_come_back) {
  for (const auto& [dim, dim_v] : {std::pair{16, 16}, {64, 64}, {72, 128}, {192, 128}, {256, 256}}) {
    SCOPED_TRACE(dim);
    Case c = kCentered;
    c.dim = dim, c.dim_v = dim_v;
    Inputs in = draw(c, 8);
    for_each(c.v_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t channel) {
      in.v.at(b, h, t, channel) = in.v.at(b, h, 0, channel);
    });
    GpuPlace place;
    const Outputs got = run(c, in, attention_of(c, Precision::bf16, gpu_backend()), Pass::forward, nullptr, &place);
    for_each(c.o_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t channel) {
      ASSERT_EQ(got.o.at(b, h, t, channel), t < 100 ? 0.0 : in.v.at(b, h / 2, 0, channel));
      ASSERT_EQ(got.o_residual.at(b, h, t, channel), 0.0);
    });
  }
}

// A number that is not finite reaches the queries that see it, and no other.
TEST(GpuCenteredValues, keep_what_is_not_finite) {
  constexpr int64_t kBad = 656;  // one of the tokens that the vector is made of
  for (const int64_t dim : {64, 80, 128, 160, 256})
    for (const double bad : {std::nan(""), double(INFINITY), -double(INFINITY)}) {
      SCOPED_TRACE(testing::Message() << dim << ' ' << bad);
      Case c = kCentered;
      c.dim = c.dim_v = dim;
      Inputs in = draw(c, 9);
      for (double& x : in.v.data) x = round_to(kBf16, x + 8.0);
      const Outputs want = run(c, in, attention_of(c, Precision::bf16, "reference"), Pass::forward);
      in.v.at(0, 1, kBad, 5) = bad;
      GpuPlace place;
      const Outputs got = run(c, in, attention_of(c, Precision::bf16, gpu_backend()), Pass::forward, nullptr, &place);
      for_each(c.o_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t channel) {
        const double x = got.o.at(b, h, t, channel), y = want.o.at(b, h, t, channel);
        const bool spoiled = h / 2 == 1 && channel == 5;
        if (spoiled && t >= kBad + 100) {
          ASSERT_FALSE(std::isfinite(x)) << h << ' ' << t;
        } else {
          ASSERT_NEAR(x, y, 0x1p-6 * std::fabs(y)) << h << ' ' << t << ' ' << channel;
        }
      });
    }
}

// Numbers of v that are f16 already stay as they are, the smallest and the largest too.
TEST(GpuF16Values, are_kept) {
  if (!gpu_computes(Pass::forward, Precision::int8_f16)) GTEST_SKIP() << "this backend computes no int8_f16";
  constexpr double kMagnitudes[] = {1, 0x1p-24, 65504};
  const Case c{.name = "f16_values",
               .heads = std::size(kMagnitudes),
               .kv_heads = std::size(kMagnitudes),
               .tokens_q = 70,
               .tokens_k = 1,
               .dim = 64,
               .dim_v = 64,
               .dtype = DType::f16,
               .out_dtype = DType::f16};
  Inputs in = draw(c, 6);
  for_each(in.v.shape, [&](int64_t b, int64_t h, int64_t t, int64_t s) { in.v.at(b, h, t, s) = kMagnitudes[h]; });
  GpuPlace place;
  const Outputs got = run(c, in, attention_of(c, Precision::int8_f16, gpu_backend()), Pass::forward, nullptr, &place);
  for_each(got.o.shape,
           [&](int64_t b, int64_t h, int64_t t, int64_t s) { ASSERT_EQ(got.o.at(b, h, t, s), kMagnitudes[h]); });
}

}  // namespace
}  // namespace octet::test
