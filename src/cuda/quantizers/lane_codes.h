// Extremes, scales and quantized values of rows in registers (lane_rows.h): codes.h says the same of rows in shared
// memory. `Symmetric`: without zero points, which take instructions.
#pragma once
#include <algorithm>

#include "cuda/quantizers/codes.h"
#include "cuda/quantizers/lane_rows.h"

namespace octet::cuda::quantizers {

// Adds the channels of a lane. Symmetric extremes are amax, in `high` alone.
template <bool Symmetric>
__device__ void add_row(const LaneRow& row, Extremes& extremes) {
#pragma unroll
  for (const float x : row) {
    if constexpr (Symmetric)
      extremes.high = max(extremes.high, order_of(magnitude_of(x)));
    else
      extremes.add(order_of(x));
  }
}

// Of `Lanes` neighbouring lanes, in all of them.
template <int Lanes, bool Symmetric>
__device__ Extremes extremes_of_lanes(Extremes extremes) {
#pragma unroll
  for (int distance = Lanes / 2; distance; distance /= 2) {
    extremes.high = max(extremes.high, __shfl_xor_sync(~0u, extremes.high, distance));
    if constexpr (!Symmetric) extremes.low = min(extremes.low, __shfl_xor_sync(~0u, extremes.low, distance));
  }
  return extremes;
}

template <bool Symmetric>
__device__ AffineScale lane_scale_of(const QuantizeParams& p, Extremes extremes) {
  if constexpr (!Symmetric) return affine_scale_of(extremes, p.how.zero_point_kind, p.range);
  if (extremes.high != Extremes().high) extremes.low = extremes.high;  // else the group is empty
  return affine_scale_of(extremes, OCTET_SYMMETRIC, p.range);
}

// The scales of several rows of the same lanes, from the extremes of each lane.
template <int Lanes, int Rows, bool Symmetric>
class LaneScales {
 public:
  __device__ LaneScales(const QuantizeParams& p, const Extremes (&extremes)[Rows]) {
    int32_t low[Rows], high[Rows];
#pragma unroll
    for (int r = 0; r < Rows; ++r) low[r] = extremes[r].low, high[r] = extremes[r].high;
    Extremes own;
    own.high = reduce_rows<Lanes>(high, [](int32_t a, int32_t b) { return max(a, b); });
    if constexpr (!Symmetric) own.low = reduce_rows<Lanes>(low, [](int32_t a, int32_t b) { return min(a, b); });
    const AffineScale scale = lane_scale_of<Symmetric>(p, own);
    scale_ = {scale.scale}, inverse_ = {scale.inverse}, zero_ = {scale.zero}, shift_ = {scale.shift};
  }
  __device__ AffineScale of(int row) const {
    AffineScale scale;
    scale.scale = scale_.of(row), scale.inverse = inverse_.of(row);
    if constexpr (!Symmetric) scale.zero = zero_.of(row), scale.shift = shift_.of(row);
    return scale;
  }

 private:
  OfRows<Lanes, Rows, float> scale_, inverse_, zero_, shift_;
};

// The codes of a lane; scale(c): of its channel c.
template <bool Symmetric, class ScaleOf>
__device__ uint2 codes_of(const QuantizeParams& p, const LaneRow& row, const ScaleOf& scale) {
  alignas(8) uint8_t codes[kLaneChannels];
  const auto encode = [&](auto byte) {
#pragma unroll
    for (int c = 0; c < kLaneChannels; ++c) codes[c] = byte(row[c], scale(c));
  };
  if (p.codes.dtype == OCTET_E4M3) {
    encode([&](float x, const AffineScale& s) { return e4m3_bits(scaled(x, s)); });
  } else if (p.codes.dtype == OCTET_E5M2) {
    encode([&](float x, const AffineScale& s) { return e5m2_bits(scaled(x, s)); });
  } else if constexpr (Symmetric) {
    // An inverse of 0 is that of numbers of which one is not finite, or of zeros.
    encode([&](float x, const AffineScale& s) {
      return s.inverse != 0.f ? integer_bits_in_range(x * s.inverse) : uint8_t{0};
    });
  } else {
    encode([&](float x, const AffineScale& s) { return integer_bits(scaled(x, s), p.range.low, p.range.high); });
  }
  return *reinterpret_cast<const uint2*>(codes);
}

template <int Lanes, bool Halves>
__device__ void store_codes(const LaneChannels<Lanes, Halves>& channels, uint2 codes, char* to) {
  if constexpr (Halves)
    *reinterpret_cast<uint32_t*>(to) = codes.x, *reinterpret_cast<uint32_t*>(to + channels.apart) = codes.y;
  else
    *reinterpret_cast<uint2*>(to) = codes;
}

}  // namespace octet::cuda::quantizers
