// Calls of the quantizers.
#include "quantized.h"

namespace octet::cli {

Quantized::Quantized(const Array& x, const QuantizerOptions& options) {
  const Shape shape = x.shape4();
  int64_t groups = 0;
  check(octet_scale_groups(options.operand, options.granularity, options.block, shape[2], &groups));
  const bool per_channel = options.granularity == OCTET_PER_CHANNEL;
  codes = Array(options.format, shape);
  scale = Array(DType::f32, Shape{shape[0], shape[1], per_channel ? 1 : groups, per_channel ? shape[3] : 1});
  if (options.zero_point != OCTET_SYMMETRIC) zero_point = Array(DType::f32, scale.shape);
  if (options.smooth) mean = Array(DType::f32, Shape{shape[0], shape[1], 1, shape[3]});
  statistics = Array(DType::f32, Shape{shape[0], shape[1], 1, OCTET_STATISTICS});

  scale_view_ = scale.view(), zero_point_view_ = zero_point.view(), mean_view_ = mean.view();
  quantization_.operand = options.operand;
  quantization_.granularity = options.granularity;
  quantization_.zero_point_kind = options.zero_point;
  quantization_.block = options.block;
  quantization_.hadamard_seed = options.hadamard_seed;
  quantization_.scale = &scale_view_;
  quantization_.zero_point = zero_point.present() ? &zero_point_view_ : nullptr;
  quantization_.mean = mean.present() ? &mean_view_ : nullptr;
  codes_view_ = codes.view();
  codes_view_.quantization = &quantization_;

  const Tensor input = x.view();
  Tensor statistics_view = statistics.view();
  options.with_rope(
      [&](const octet_rope& rope) { check(octet_quantize(&input, &rope, &codes_view_, &statistics_view, nullptr)); });
}

Array Quantized::dequantized(DType dtype) const {
  Array x(dtype, codes.shape);
  Tensor view = x.view();
  check(octet_dequantize(&codes_view_, &view, nullptr));
  return x;
}

}  // namespace octet::cli
