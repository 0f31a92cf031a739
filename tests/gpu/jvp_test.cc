// The jvp pass, row by row against float64: tiles that end anywhere, logits that grow from one tile to the next, so
// that tiles are repeated over a new maximum, and tangents beyond f16, which p times them exceeds. Tokens that are not
// seen may hold anything, and a NaN that a mask hides reaches no other row.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gpu/place.h"
#include "support/cases.h"
#include "support/row_bars.h"
#include "support/seen.h"

namespace octet::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kDims[][2] = {{64, 64}, {128, 128}, {72, 40}, {96, 88}};

// Cases without numbers of tokens that divide into tiles.
std::vector<Case> shapes() {
  const Case full{
      .name = "full", .batch = 2, .heads = 4, .kv_heads = 2, .tokens_q = 333, .tokens_k = 397, .dlse = true};
  Case few = full, one_key = full, top_left = full, bottom_right = full, more_queries = full, window = full,
       packed = full, packed_causal = full, sinks = full;
  few.name = "few", few.tokens_q = 3, few.tokens_k = 65;
  one_key.name = "one_key", one_key.tokens_q = 130, one_key.tokens_k = 1;
  top_left.name = "top_left", top_left.causal = true, top_left.alignment = Alignment::top_left;
  bottom_right.name = "bottom_right", bottom_right.causal = true, bottom_right.alignment = Alignment::bottom_right;
  more_queries = bottom_right;
  more_queries.name = "more_queries", more_queries.tokens_q = 500, more_queries.tokens_k = 200;
  window.name = "window", window.window = {{90, 20}}, window.alignment = Alignment::bottom_right;
  packed.name = "packed", packed.batch = 1, packed.tokens_q = 500, packed.tokens_k = 600;
  packed.cu_seqlens_q = {0, 130, 130, 301, 500}, packed.cu_seqlens_k = {0, 70, 90, 90, 600};
  packed_causal = packed;
  packed_causal.name = "packed_causal", packed_causal.causal = true, packed_causal.alignment = Alignment::bottom_right;
  sinks.name = "sinks", sinks.sinks = Sinks::shared;
  return {full, few, one_key, top_left, bottom_right, more_queries, window, packed, packed_causal, sinks};
}

class GpuJvp : public testing::TestWithParam<Precision> {
 protected:
  void SetUp() override {
    if (!gpu_computes(Pass::jvp, GetParam())) GTEST_SKIP() << "this backend computes no " << name(GetParam());
  }
  static DType type() {
    return GetParam() == Precision::f16 ? DType::f16 : GetParam() == Precision::f32 ? DType::f32 : DType::bf16;
  }
  // Runs `f` for all shapes and head dims.
  template <class F>
  void each(const F& f) const {
    for (Case c : shapes())
      for (const auto& [dim, dim_v] : kDims) {
        c.dim = dim, c.dim_v = dim_v;
        c.dtype = c.out_dtype = type();
        SCOPED_TRACE(testing::Message() << "case " << c.name << ", head dims " << dim << " and " << dim_v);
        f(c);
      }
  }
  Outputs run_on_gpu(const Case& c, const Inputs& in) const {
    GpuPlace place;
    return run(c, in, attention_of(c, GetParam(), gpu_backend()), Pass::jvp, nullptr, &place);
  }
  void expect_right(const Case& c, Inputs in) const {
    for (Values* x : {&in.q, &in.k, &in.v, &in.tq, &in.tk, &in.tv}) *x = rounded(*x, c.dtype);
    const Outputs want = exact(c, in, Pass::jvp);
    const RowBars bars = row_bars(c, in, attention_of(c, GetParam(), gpu_backend()), Pass::jvp, want, {});
    EXPECT_EQ(wrong_row(run_on_gpu(c, in), want, bars, Pass::jvp), "");
  }
};

TEST_P(GpuJvp, is_right_in_every_row) {
  each([&](const Case& c) { expect_right(c, draw(c, 1)); });
}

TEST_P(GpuJvp, takes_absent_tangents_as_zeros) {
  for (Case c : shapes())
    for (const auto& [dim, dim_v] : kDims) {
      if (c.name != "bottom_right" && c.name != "sinks") continue;
      c.dim = dim, c.dim_v = dim_v, c.dtype = c.out_dtype = type();
      for (int there = 0; there < 7; ++there) {  // bits: of tq, tk, tv
        Inputs in = draw(c, 5), zeros = in;
        int bit = 1;
        for (Values Inputs::*t : {&Inputs::tq, &Inputs::tk, &Inputs::tv}) {
          if (!(there & bit)) in.*t = Values(), zeros.*t = Values((zeros.*t).shape);
          bit *= 2;
        }
        SCOPED_TRACE(testing::Message() << "case " << c.name << ", head dims " << dim << " and " << dim_v
                                        << ", tangents " << there);
        const Outputs want = exact(c, zeros, Pass::jvp);
        const RowBars bars = row_bars(c, zeros, attention_of(c, GetParam(), gpu_backend()), Pass::jvp, want, {});
        EXPECT_EQ(wrong_row(run_on_gpu(c, in), want, bars, Pass::jvp), "");
      }
    }
}

TEST_P(GpuJvp, raises_the_maximum) {
  each([&](const Case& c) {
    Inputs in = draw(c, 2);
    for_each(c.k_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t i) {
      in.k.at(b, h, t, i) *= 1 + 6 * static_cast<double>(c.tokens_k - t) / static_cast<double>(c.tokens_k);
    });
    expect_right(c, in);
  });
}

TEST_P(GpuJvp, keeps_large_tangents) {
  each([&](const Case& c) {
    Inputs in = draw(c, 3);
    for_each(c.k_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t i) {
      in.tk.at(b, h, t, i) *= 2000, in.k.at(b, h, t, i) *= 1 + static_cast<double>(c.tokens_k - t) / 200;
    });
    expect_right(c, in);
  });
}

TEST_P(GpuJvp, reads_no_token_that_is_not_seen) {
  for (Case c : partly_seen_cases())
    for (const auto& [dim, dim_v] : kDims) {
      c.dim = dim, c.dim_v = dim_v, c.kv_heads = 1, c.dlse = true;
      c.dtype = c.out_dtype = type();
      const PartlySeen x = partly_seen(c, 1);
      if (!gpu_takes_logits(x.c, Pass::jvp, {}, x.in.mask_dtype, x.in.mask.shape)) continue;
      SCOPED_TRACE(testing::Message() << "case " << c.name << ", head dims " << dim << " and " << dim_v);
      const Outputs want = run_on_gpu(x.c, x.in);
      const Outputs got = run_on_gpu(x.c, with_unseen(x, [](uint64_t i) { return i % 3 ? kNaN : -kInfinity; }));
      for (const auto& [a, b] :
           {std::pair{&got.o, &want.o}, {&got.to, &want.to}, {&got.lse, &want.lse}, {&got.tlse, &want.tlse}})
        EXPECT_EQ(a->data, b->data);
    }
}

TEST_P(GpuJvp, hides_nan_of_one_key) {
  each([&](const Case& c) {
    const Inputs in = draw(c, 4);
    Inputs spoilt = in;
    const int64_t key = c.tokens_k * 2 / 3;
    for (int64_t b = 0; b < c.batch; ++b) spoilt.v.at(b, 0, key, 1) = spoilt.tv.at(b, 0, key, 2) = kNaN;
    const Outputs want = run_on_gpu(c, in), got = run_on_gpu(c, spoilt);
    for_each(c.o_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t i) {
      if (h < c.heads / c.kv_heads && sees(c, in, b, h, t, key)) return;
      // Rows that met the NaN in their tile are computed again, in another order.
      for (const auto& [x, y] : {std::pair{&got.o, &want.o}, {&got.to, &want.to}})
        ASSERT_NEAR(x->at(b, h, t, i), y->at(b, h, t, i), .05 * (1 + std::fabs(y->at(b, h, t, i))))
            << "query " << t << " of head " << h << ", channel " << i;
    });
  });
}

INSTANTIATE_TEST_SUITE_P(Precisions, GpuJvp, testing::Values(Precision::bf16, Precision::f16, Precision::f32),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace octet::test
