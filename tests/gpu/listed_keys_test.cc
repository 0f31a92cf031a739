// Key masks of few queries, whose keys are listed and read where they lie: every row against float64, with NaN in keys
// that the mask hides.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>

#include "gpu/place.h"
#include "support/cases.h"
#include "support/row_bars.h"

namespace octet::test {
namespace {

struct Shape {
  const char* name;
  MaskTensor mask;
  Layout layout;
  int64_t batch, queries, keys, dim;
};

class GpuListedKeys : public testing::TestWithParam<std::tuple<Shape, DType>> {};

TEST_P(GpuListedKeys, are_all_that_is_read) {
  const auto& [shape, dtype] = GetParam();
  Case c{.name = shape.name,
         .batch = shape.batch,
         .heads = 4,
         .kv_heads = 2,
         .tokens_q = shape.queries,
         .tokens_k = shape.keys,
         .dim = shape.dim,
         .dim_v = shape.dim,
         .mask = shape.mask,
         .dtype = dtype,
         .layout = shape.layout,
         .kv_layout = shape.layout};
  const Inputs in = draw(c, 3);
  Inputs hidden_nan = in;
  for_each(c.k_shape(), [&](int64_t b, int64_t h, int64_t key, int64_t channel) {
    if (in.mask.at(c.mask == MaskTensor::keys ? 0 : b, 0, 0, key) != 0.0) return;
    hidden_nan.k.at(b, h, key, channel) = hidden_nan.v.at(b, h, key, channel) = NAN;
  });
  Attention attention = attention_of(c, dtype == DType::f16 ? Precision::f16 : Precision::bf16, gpu_backend());
  const Outputs want = exact(c, in, Pass::forward);
  // The reference of the bars has P in the precision's own type, as few queries have it. An o of 16 bits comes with
  // o_residual, which those kernels do not write.
  attention.bias_correction = BiasCorrection::none;
  for (const DType out : {DType::f32, dtype}) {
    c.out_dtype = out;
    if (tests_sm80()) {
      GpuPlace nowhere;
      const std::string kernel = explained(c, in, attention, Pass::forward, &nowhere);
      EXPECT_EQ(kernel.find("keys in pages that a mask leaves") != std::string::npos, !c.has_residual()) << kernel;
    }
    GpuPlace place;
    const Outputs got = run(c, hidden_nan, attention, Pass::forward, nullptr, &place);
    const RowBars bars = row_bars(c, in, attention, Pass::forward, want, {});
    EXPECT_EQ(wrong_row(got, want, bars, Pass::forward), "");
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, GpuListedKeys,
    testing::Combine(testing::Values(Shape{"static_cache", MaskTensor::padding, Layout::bhtd, 4, 1, 1024, 128},
                                     Shape{"shared_mask", MaskTensor::keys, Layout::bhtd, 3, 5, 700, 64},
                                     Shape{"token_major", MaskTensor::padding, Layout::bthd, 3, 7, 333, 256},
                                     Shape{"one_element", MaskTensor::padding, Layout::bhtd, 1, 1, 20000, 64}),
                     testing::Values(DType::f16, DType::bf16)),
    [](const auto& info) {
      return std::string(std::get<0>(info.param).name) + (std::get<1>(info.param) == DType::f16 ? "_f16" : "_bf16");
    });

}  // namespace
}  // namespace octet::test
