// ALiBi whose slopes are so steep, or negative, that a term common to a row would take all bits of its logits: with
// masks that hide the diagonal, with packed sequences, and with more queries than keys.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <tuple>

#include "gpu/place.h"
#include "support/cases.h"

namespace octet::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr auto kTopLeft = Alignment::top_left, kBottomRight = Alignment::bottom_right;
const Case kSteep[] = {
    {.name = "causal",
     .heads = 4,
     .kv_heads = 2,
     .tokens_q = 300,
     .tokens_k = 300,
     .causal = true,
     .alignment = kBottomRight},
    {.name = "top_left",
     .heads = 4,
     .kv_heads = 4,
     .tokens_q = 270,
     .tokens_k = 350,
     .causal = true,
     .alignment = kTopLeft},
    {.name = "window",
     .heads = 4,
     .kv_heads = 1,
     .tokens_q = 330,
     .tokens_k = 200,
     .window = {{90, 40}},
     .alignment = kTopLeft},
    {.name = "far", .batch = 2, .heads = 4, .kv_heads = 2, .tokens_q = 400, .tokens_k = 70},
    {.name = "wide", .heads = 4, .kv_heads = 2, .tokens_q = 130, .tokens_k = 420},
    {.name = "packed",
     .heads = 4,
     .kv_heads = 2,
     .tokens_q = 420,
     .tokens_k = 490,
     .causal = true,
     .alignment = kBottomRight,
     .cu_seqlens_q = {0, 70, 70, 230, 420},
     .cu_seqlens_k = {0, 190, 240, 340, 490}},
};

void expect_as_good(const char* name, const Values& got, const Values& plain, const Values& exact, double noise) {
  const Difference error = difference(got, exact);
  EXPECT_LE(error.largest, 2 * difference(plain, exact).largest + noise) << name << ": " << text(error);
}

class GpuAlibi : public testing::TestWithParam<Precision> {};

TEST_P(GpuAlibi, of_any_slope_keeps_the_bits_of_the_logits) {
  for (Case c : kSteep)
    for (const int64_t dim : {64, 128}) {
      SCOPED_TRACE(testing::Message() << c.name << ", head dim " << dim);
      c.dim = c.dim_v = dim, c.alibi = Alibi::shared;
      c.dtype = GetParam() == Precision::f16 ? DType::f16 : DType::bf16;
      Inputs in = draw(c, 3);
      for (int64_t h = 0; h < c.heads; ++h) in.alibi_slopes.at(0, h, 0, 0) = std::array{1000., -1000., 2., -.25}[h];
      Inputs flat = in;
      flat.alibi_slopes = Values(in.alibi_slopes.shape);
      const Noise noise = f32_noise(c, flat, largest_column_sum(c, in), 5.0), of_lse = f32_noise(c, in, 0.0, 5.0);
      const Attention plain = attention_of(c, GetParam(), "reference"),
                      gpu = attention_of(c, GetParam(), gpu_backend());
      const auto on_gpu = [&](Pass pass, const Outputs* saved) {
        GpuPlace place;
        return run(c, in, gpu, pass, saved, &place);
      };
      const Outputs want = exact(c, in, Pass::backward), want_o = exact(c, in, Pass::forward);
      const Outputs saved = run(c, in, plain, Pass::forward), expected = run(c, in, plain, Pass::backward, &saved);
      const Outputs o = on_gpu(Pass::forward, nullptr), got = on_gpu(Pass::backward, &o);
      expect_as_good("o", o.o, saved.o, want_o.o, noise.o);
      expect_as_good("lse", o.lse, saved.lse, want_o.lse, of_lse.lse);
      expect_as_good("dq", got.dq, expected.dq, want.dq, noise.dq);
      expect_as_good("dk", got.dk, expected.dk, want.dk, noise.dk);
      expect_as_good("dv", got.dv, expected.dv, want.dv, noise.dv);
    }
}

// A head whose slope is not finite is NaN, and no other.
TEST_P(GpuAlibi, of_a_slope_that_is_not_finite_is_nan) {
  Case c = kSteep[0];
  c.kv_heads = 4, c.alibi = Alibi::shared, c.dtype = DType::bf16;
  const Inputs in = draw(c, 4);
  for (const double slope : {kInfinity, -kInfinity, kNaN}) {
    Inputs spoilt = in;
    spoilt.alibi_slopes.at(0, 1, 0, 0) = slope;
    const Attention gpu = attention_of(c, GetParam(), gpu_backend());
    const auto both = [&](const Inputs& inputs) {
      GpuPlace place, other;
      const Outputs saved = run(c, inputs, gpu, Pass::forward, nullptr, &place);
      Outputs all = run(c, inputs, gpu, Pass::backward, &saved, &other);
      all.o = saved.o, all.lse = saved.lse;
      return all;
    };
    const Outputs want = both(in), got = both(spoilt);
    for (const auto& [name, x, y] :
         {std::tuple{"o", &got.o, &want.o}, {"lse", &got.lse, &want.lse}, {"dv", &got.dv, &want.dv}})
      for_each(x->shape, [&, x = x, y = y, name = name](int64_t b, int64_t h, int64_t t, int64_t i) {
        if (h == 1)
          EXPECT_TRUE(std::isnan(x->at(b, h, t, i))) << name;
        else
          EXPECT_EQ(x->at(b, h, t, i), y->at(b, h, t, i)) << name;
      });
  }
}

INSTANTIATE_TEST_SUITE_P(Precisions, GpuAlibi, testing::Values(Precision::bf16, Precision::f16),
                         [](const auto& info) { return std::string(name(info.param)); });

}  // namespace
}  // namespace octet::test
