// Extremes, scales and quantized values of rows in shared memory.
#pragma once
#include "cuda/quantizers/rows.h"

namespace octet::cuda::quantizers {

// Returns what a number adds to the extremes of its group. Symmetric u8 holds no negative numbers: on a GPU, whose
// numbers the host cannot look at, they make their group NaN.
__device__ inline int32_t order_in_group(const QuantizeParams& p, float x) {
  if (!p.symmetric()) return order_of(x);
  if (p.codes.dtype == OCTET_U8 && x < 0.f) return order_of(std::numeric_limits<float>::quiet_NaN());
  return order_of(magnitude_of(x));
}

__device__ inline void add_row(const QuantizeParams& p, const float* row, Extremes& extremes) {
  for (int c = lane(); c < p.dim(); c += 32) extremes.add(order_in_group(p, row[c]));
}
// Of all lanes.
__device__ inline Extremes extremes_of_warp(const Extremes& e) {
  return {__reduce_min_sync(~0u, e.low), __reduce_max_sync(~0u, e.high)};
}

__device__ inline void write_scale(const QuantizeParams& p, const BatchHead& i, int group, int channel,
                                   const AffineScale& scale) {
  *at<float>(p.how.scale, i, group, channel) = scale.scale;
  if (!p.symmetric()) *at<float>(p.how.zero_point, i, group, channel) = scale.zero_point(p.how.zero_point_kind);
}

// Writes the quantized values of a row; scale(c): of channel c.
template <class ScaleOf>
__device__ void write_codes(const QuantizeParams& p, const BatchHead& i, int token, const float* row,
                            const ScaleOf& scale) {
  auto* const to = at<uint8_t>(p.codes, i, token);
  const int64_t stride = p.codes.stride[3];
  const auto byte = [&](int c) { return byte_of(p.codes.dtype, p.range, scaled(row[c], scale(c))); };
  int first = 0;
  if (stride == 1 && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    for (int v = lane(); v < p.dim() / 4; v += 32)
      reinterpret_cast<uchar4*>(to)[v] = {byte(4 * v), byte(4 * v + 1), byte(4 * v + 2), byte(4 * v + 3)};
    first = p.dim() / 4 * 4;
  }
  for (int c = first + lane(); c < p.dim(); c += 32) to[c * stride] = byte(c);
}

}  // namespace octet::cuda::quantizers
