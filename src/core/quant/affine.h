// From the extremes of a group to its scale and zero point, and from numbers to quantized values. The quantizers of the
// CPU and of the GPU share this arithmetic. They are compiled without contraction of products and sums.
#pragma once
#include <octet/octet.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "core/quant/elements.h"
#include "core/quant/scale.h"

namespace octet {

// The range of a format: x / scale lies in [low, high].
struct Range {
  float low, high;
};
static constexpr Range range_of(octet_dtype dtype) {
  switch (dtype) {
    case OCTET_I8:
      return {-127.f, 127.f};
    case OCTET_U8:
      return {0.f, 255.f};
    case OCTET_I4:
      return {-7.f, 7.f};
    case OCTET_E4M3:
      return {-448.f, 448.f};
    default:
      return {-57344.f, 57344.f};
  }
}
static constexpr bool is_integer(octet_dtype dtype) {
  return dtype == OCTET_I8 || dtype == OCTET_U8 || dtype == OCTET_I4;
}

// Integers that order as floats do, NaN at both ends, so that extremes keep NaN. Its own inverse.
static constexpr int32_t order_of(float x) {
  const auto bits = std::bit_cast<int32_t>(x);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
static constexpr float of_order(int32_t order) { return std::bit_cast<float>(order ^ (order >> 31 & 0x7fffffff)); }

// The extremes of a group, as order_of: amax where there are no zero points, else the lowest and the highest.
struct Extremes {
  int32_t low = std::numeric_limits<int32_t>::max(), high = std::numeric_limits<int32_t>::min();

  constexpr bool empty() const { return low > high; }
  constexpr void add(int32_t order) {
    low = order < low ? order : low;
    high = order > high ? order : high;
  }
  constexpr void add(const Extremes& other) {
    low = other.low < low ? other.low : low;
    high = other.high > high ? other.high : high;
  }
};

// x ~ scale * (value - zero) + shift, and value = round((x - shift) * inverse) + zero.
struct AffineScale {
  float scale = 0.f, inverse = 0.f, zero = 0.f, shift = 0.f;

  constexpr float zero_point(octet_zero_point kind) const { return kind == OCTET_ZERO_POINT_FLOAT ? shift : zero; }
};

static constexpr AffineScale affine_scale_of(const Extremes& extremes, octet_zero_point kind, Range range) {
  if (extremes.empty()) return {};
  float low = of_order(extremes.low), high = of_order(extremes.high);
  if (kind == OCTET_SYMMETRIC) {
    const Scale s = scale_of(high, range.high);
    return {s.scale, s.inverse, 0.f, 0.f};
  }
  if (kind == OCTET_ZERO_POINT_INTEGER) {
    // The range always holds 0, so that the zero point is itself a quantized value.
    low = std::min(low, 0.f), high = std::max(high, 0.f);
    const Scale s = scale_of(high - low, range.high - range.low);
    return {s.scale, s.inverse, s.scale > 0.f ? nearest_even(range.low - low * s.inverse) : 0.f, 0.f};
  }
  // The range is centred on its middle, or starts at its lower end where quantized values do at 0.
  const float shift = range.low < 0.f ? 0.5f * low + 0.5f * high : low;
  const Scale s = scale_of(std::max(high - shift, shift - low), range.high);
  return {s.scale, s.inverse, 0.f, is_finite(shift) ? shift : 0.f};
}

// (x - shift) / scale + zero; what is added to the zero point is an integer, for zero points to be exact.
static constexpr float scaled(float x, const AffineScale& scale) {
  float r = (x - scale.shift) * scale.inverse;
  r = r == r ? r : 0.f;
  if (scale.zero == 0.f) return r;
  r = r > -512.f ? r : -512.f;
  r = r < 512.f ? r : 512.f;
  return nearest_even(r) + scale.zero;
}

// The byte of a scaled number.
static constexpr uint8_t byte_of(octet_dtype dtype, Range range, float scaled) {
  switch (dtype) {
    case OCTET_E4M3:
      return e4m3_bits(scaled);
    case OCTET_E5M2:
      return e5m2_bits(scaled);
    default:
      return integer_bits(scaled, range.low, range.high);
  }
}

// The byte of a finite number that rounds to an integer within the range, as those over a symmetric scale do.
static constexpr uint8_t integer_bits_in_range(float x) {
  return static_cast<uint8_t>(std::bit_cast<uint32_t>(x + kRoundingMagic));
}

// The number that a quantized value stands for. The product of two floats is exact in double: fused or not, it is
// rounded once.
static constexpr float affine_value(float value, float scale, float zero, octet_zero_point kind) {
  if (kind == OCTET_ZERO_POINT_FLOAT) return static_cast<float>(static_cast<double>(scale) * value + zero);
  return scale * (value - zero);
}

// The mean squared rounding error of a number. Values at equal distances err uniformly within half a scale. The
// distances of fp8 numbers vary, so their error is measured.
static constexpr double squared_error(float scale) { return scale * static_cast<double>(scale) / 12; }
static constexpr double squared_error(float x, float scale, float value) {
  const double error = x - static_cast<double>(scale) * value;
  return error * error;
}

}  // namespace octet
