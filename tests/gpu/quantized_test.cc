// Inputs that are e4m3 codes with a scale for each head, at fp8: such scales, where they are powers of two, are those
// of the logits and of o, and change no other bit.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "gpu/place.h"
#include "support/cases.h"

namespace octet::test {
namespace {

// A tensor of codes with a scale for each head, where the GPU reads them.
struct Codes {
  Buffer codes, scale;
  Tensor scale_view;
  octet_quantization quantization = OCTET_QUANTIZATION_INIT;
  Tensor view;

  Codes(const Values& x, const Values& scales, octet_operand operand, GpuPlace& place)
      : codes(x, DType::e4m3), scale(scales, DType::f32), scale_view(place.tensor(scale)), view(place.tensor(codes)) {
    quantization.operand = operand, quantization.granularity = OCTET_PER_TENSOR;
    quantization.scale = &scale_view;
    view.quantization = &quantization;
  }
  Codes(const Codes&) = delete;  // views point into it
};

TEST(GpuQuantizedInputs, have_scales_that_change_no_other_bit) {
  for (const int64_t dim : {64, 128}) {
    const Case c{.name = "scales",
                 .batch = 2,
                 .heads = 4,
                 .kv_heads = 2,
                 .tokens_q = 300,
                 .tokens_k = 410,
                 .dim = dim,
                 .dim_v = dim,
                 .dtype = DType::e4m3};
    SCOPED_TRACE(testing::Message() << "dim " << dim << ", seed " << dim);
    const Inputs in = draw(c, static_cast<uint64_t>(dim));
    const auto scales = [&](int64_t heads, int step) {
      Values x({c.batch, heads, 1, 1});
      for_each(x.shape, [&](int64_t b, int64_t h, int64_t, int64_t) {
        x.at(b, h, 0, 0) = std::ldexp(1.0, static_cast<int>(step * (b * heads + h) % 5) - 2);
      });
      return x;
    };
    const Values of_q = scales(c.heads, 1), of_k = scales(c.kv_heads, 2), of_v = scales(c.kv_heads, 3);
    const auto attention_with = [&](double scale) {
      Attention attention = attention_of(c, Precision::fp8, gpu_backend());
      attention.scale = scale;
      return attention;
    };
    const Buffer o(DType::f32, c.o_shape()), lse(DType::f32, c.lse_shape());
    {
      GpuPlace place;
      const Codes q(in.q, of_q, OCTET_OPERAND_Q, place), k(in.k, of_k, OCTET_OPERAND_K, place),
          v(in.v, of_v, OCTET_OPERAND_V, place);
      call(attention_with(c.effective_scale()),
           Forward{.q = q.view, .k = k.view, .v = v.view, .o = place.tensor(o), .lse = place.tensor(lse)}, place);
    }
    const Values got_o = o.values(), got_lse = lse.values();
    for (int64_t b = 0; b < c.batch; ++b)
      for (int64_t h = 0; h < c.heads; ++h) {
        const int64_t of = h / (c.heads / c.kv_heads);
        GpuPlace place;
        const Buffer q(in.q, DType::e4m3), k(in.k, DType::e4m3), v(in.v, DType::e4m3);
        const Buffer plain_o(DType::f32, c.o_shape()), plain_lse(DType::f32, c.lse_shape());
        call(attention_with(c.effective_scale() * of_q.at(b, h, 0, 0) * of_k.at(b, of, 0, 0)),
             Forward{.q = place.tensor(q),
                     .k = place.tensor(k),
                     .v = place.tensor(v),
                     .o = place.tensor(plain_o),
                     .lse = place.tensor(plain_lse)},
             place);
        const Values want_o = plain_o.values(), want_lse = plain_lse.values();
        for (int64_t t = 0; t < c.tokens_q; ++t) {
          ASSERT_EQ(got_lse.at(b, h, t, 0), want_lse.at(b, h, t, 0)) << "lse of " << b << ' ' << h << ' ' << t;
          for (int64_t i = 0; i < dim; ++i)
            ASSERT_EQ(got_o.at(b, h, t, i), want_o.at(b, h, t, i) * of_v.at(b, of, 0, 0))
                << "o of " << b << ' ' << h << ' ' << t << ' ' << i;
        }
      }
  }
}

// At fp8 q of e4m3 stays as it is, or keeps the scale that it came with, and k of 16 bits is centred: lse and sinks
// need the product of the two. sm90 rejects such a pair, so that sm80 computes it on every GPU.
class GpuQuantizedQueries : public testing::TestWithParam<bool> {};

TEST_P(GpuQuantizedQueries, leave_the_mean_of_k_in_lse) {
  const bool scaled = GetParam();
  const Case c{.name = "e4m3_queries",
               .batch = 2,
               .heads = 4,
               .kv_heads = 2,
               .tokens_q = 100,
               .tokens_k = 150,
               .dtype = DType::e4m3};
  Inputs in = draw(c, 11);
  for_each(c.k_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t i) { in.k.at(b, h, t, i) += i % 3 - 1.0; });
  Values sinks({1, c.heads, 1, 1});
  for (double& x : sinks.data) x = 1.0;
  Values scales({c.batch, c.heads, 1, 1});
  for_each(scales.shape, [&](int64_t b, int64_t h, int64_t, int64_t) { scales.at(b, h, 0, 0) = .3 + .2 * (b + h); });
  const Buffer q(in.q, DType::e4m3), k(in.k, DType::bf16), v(in.v, DType::e4m3), z(sinks, DType::f32),
      of_q(scales, DType::f32);
  const auto answer = [&](const char* backend, Precision precision, GpuPlace* place) {
    const Buffer o(DType::f32, c.o_shape()), lse(DType::f32, c.lse_shape());
    const auto at = [&](const Buffer& x) { return place ? place->tensor(x) : x.view(); };
    Tensor scale = at(of_q);
    octet_quantization quantization = OCTET_QUANTIZATION_INIT;
    quantization.operand = OCTET_OPERAND_Q, quantization.granularity = OCTET_PER_TENSOR;
    quantization.scale = &scale;
    Forward arguments{.q = at(q), .k = at(k), .v = at(v), .o = at(o), .lse = at(lse), .extras = {.sinks = at(z)}};
    if (scaled) arguments.q.quantization = &quantization;
    if (place)
      call(attention_of(c, precision, backend), arguments, *place);
    else
      octet::run(attention_of(c, precision, backend), arguments);
    return std::pair{o.values(), lse.values()};
  };
  GpuPlace place;
  const auto [o, lse] = answer("sm80", Precision::fp8, &place);
  const auto [plain_o, plain_lse] = answer("reference", Precision::fp8, nullptr);
  const auto [exact_o, exact_lse] = answer("reference", Precision::f64, nullptr);
  EXPECT_LE(difference(o, exact_o).rms, 2 * difference(plain_o, exact_o).rms);
  EXPECT_LE(difference(lse, exact_lse).rms, 2 * difference(plain_lse, exact_lse).rms);
}

INSTANTIATE_TEST_SUITE_P(Scales, GpuQuantizedQueries, testing::Bool());

}  // namespace
}  // namespace octet::test
