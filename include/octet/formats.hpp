// The numbers of octet.h's element types: rounding to a format, and elements in memory to and from double.
// Header-only, C++20. Conversions round to nearest, ties to even. e4m3 and e5m2 saturate, as the GPU's casts do;
// f16, bf16 and f32 overflow to infinity as IEEE 754 says.
#pragma once
#include <octet/octet.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace octet {

// A binary floating-point format narrower than double.
struct Format {
  int mantissa_bits;  // stored, without the leading one
  int min_exponent;   // of the smallest normal number
  double largest;     // finite
  bool saturates;     // beyond `largest`: clamp; else infinity
};

constexpr Format kF32{23, -126, 0x1.fffffep127, false};
constexpr Format kF16{10, -14, 65504.0, false};
constexpr Format kBf16{7, -126, 0x1.fep127, false};
constexpr Format kE4m3{3, -6, 448.0, true};
constexpr Format kE5m2{2, -14, 57344.0, true};

// The number of `format` nearest to x. NaN stays NaN.
inline double round_to(const Format& format, double x) {
  if (!(std::fabs(x) > 0.0)) return x;  // zero, NaN
  if (std::fabs(x) < 2 * format.largest) {
    int exponent = static_cast<int>(std::bit_cast<uint64_t>(x) >> 52 & 0x7ff) - 1023;
    if (exponent < format.min_exponent) exponent = format.min_exponent;
    // Adding 1.5 * 2^52 units of the last place leaves no bits below it, rounded to nearest even.
    const auto magic_exponent = static_cast<uint64_t>(1023 + 52 + exponent - format.mantissa_bits);
    const auto magic = std::bit_cast<double>(magic_exponent << 52 | uint64_t{1} << 51);
    const double rounded = (x + magic) - magic;
    if (std::fabs(rounded) <= format.largest) return std::copysign(rounded, x);
  }
  return std::copysign(format.saturates ? format.largest : std::numeric_limits<double>::infinity(), x);
}

// The same by dtype. f64: x itself. Integer types: the nearest integer in their range.
inline double round_to(octet_dtype dtype, double x) {
  const auto integer = [x](double low, double high) {
    return std::isnan(x) ? 0.0 : std::fmin(std::fmax(std::nearbyint(x), low), high);
  };
  switch (dtype) {
    case OCTET_F32:
      return round_to(kF32, x);
    case OCTET_F16:
      return round_to(kF16, x);
    case OCTET_BF16:
      return round_to(kBf16, x);
    case OCTET_E4M3:
      return round_to(kE4m3, x);
    case OCTET_E5M2:
      return round_to(kE5m2, x);
    case OCTET_I8:
      return integer(-127, 127);
    case OCTET_U8:
      return integer(0, 255);
    case OCTET_I4:
      return integer(-7, 7);
    case OCTET_I32:
      return integer(-2147483648.0, 2147483647.0);
    case OCTET_BOOL:
      return x != 0.0;
    default:
      return x;
  }
}

namespace detail {

// 2^exponent, a normal double. Tests convert many numbers, and std::ldexp takes as long as all else.
constexpr double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}
// The exponent of a positive, normal double.
constexpr int exponent_of(double x) { return static_cast<int>(std::bit_cast<uint64_t>(x) >> 52) - 1023; }

// Bits of a number of `format` (already rounded) with `exponent_bits` of exponent.
inline uint32_t encode_bits(const Format& format, int exponent_bits, double x) {
  const uint32_t sign = std::signbit(x) ? 1u << (format.mantissa_bits + exponent_bits) : 0u;
  const double magnitude = std::fabs(x);
  if (magnitude == 0.0) return sign;
  const uint32_t top = (1u << exponent_bits) - 1;
  if (!std::isfinite(x)) {  // only e4m3 has no infinity, and it never gets one
    const uint32_t all = format.mantissa_bits == 3 ? (1u << 3) - 1
                         : std::isnan(x)           ? 1u << (format.mantissa_bits - 1)
                                                   : 0u;
    return sign | top << format.mantissa_bits | all;
  }
  const int exponent = exponent_of(magnitude);
  if (exponent < format.min_exponent)
    return sign | static_cast<uint32_t>(magnitude * power_of_two(format.mantissa_bits - format.min_exponent));
  const auto mantissa =
      static_cast<uint32_t>(magnitude * power_of_two(format.mantissa_bits - exponent)) - (1u << format.mantissa_bits);
  return sign | static_cast<uint32_t>(exponent - format.min_exponent + 1) << format.mantissa_bits | mantissa;
}

inline double decode_bits(const Format& format, int exponent_bits, uint32_t bits) {
  const uint32_t mantissa = bits & ((1u << format.mantissa_bits) - 1);
  const uint32_t exponent = bits >> format.mantissa_bits & ((1u << exponent_bits) - 1);
  const double sign = bits >> (format.mantissa_bits + exponent_bits) & 1 ? -1.0 : 1.0;
  const bool top = exponent == (1u << exponent_bits) - 1;
  const bool e4m3 = format.mantissa_bits == 3;
  if (top && (!e4m3 || mantissa == 7))
    return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  if (!exponent) return sign * mantissa * power_of_two(format.min_exponent - format.mantissa_bits);
  return sign * (mantissa + (1u << format.mantissa_bits)) *
         power_of_two(static_cast<int>(exponent) - 1 + format.min_exponent - format.mantissa_bits);
}

}  // namespace detail

// The element at `index` of an array of `dtype`.
inline double load(octet_dtype dtype, const void* data, int64_t index) {
  switch (dtype) {
    case OCTET_F64:
      return static_cast<const double*>(data)[index];
    case OCTET_F32:
      return static_cast<const float*>(data)[index];
    case OCTET_F16:
      return detail::decode_bits(kF16, 5, static_cast<const uint16_t*>(data)[index]);
    case OCTET_BF16:
      return std::bit_cast<float>(static_cast<uint32_t>(static_cast<const uint16_t*>(data)[index]) << 16);
    case OCTET_E4M3:
      return detail::decode_bits(kE4m3, 4, static_cast<const uint8_t*>(data)[index]);
    case OCTET_E5M2:
      return detail::decode_bits(kE5m2, 5, static_cast<const uint8_t*>(data)[index]);
    case OCTET_I8:
    case OCTET_I4:
      return static_cast<const int8_t*>(data)[index];
    case OCTET_U8:
    case OCTET_BOOL:
      return static_cast<const uint8_t*>(data)[index];
    case OCTET_I32:
      return static_cast<const int32_t*>(data)[index];
    default:
      return std::numeric_limits<double>::quiet_NaN();
  }
}

// Stores x, rounded to `dtype`.
inline void store(octet_dtype dtype, void* data, int64_t index, double x) {
  const double rounded = round_to(dtype, x);
  switch (dtype) {
    case OCTET_F64:
      static_cast<double*>(data)[index] = x;
      break;
    case OCTET_F32:
      static_cast<float*>(data)[index] = static_cast<float>(rounded);
      break;
    case OCTET_F16:
      static_cast<uint16_t*>(data)[index] = static_cast<uint16_t>(detail::encode_bits(kF16, 5, rounded));
      break;
    case OCTET_BF16:
      static_cast<uint16_t*>(data)[index] = static_cast<uint16_t>(detail::encode_bits(kBf16, 8, rounded));
      break;
    case OCTET_E4M3:
      static_cast<uint8_t*>(data)[index] = static_cast<uint8_t>(detail::encode_bits(kE4m3, 4, rounded));
      break;
    case OCTET_E5M2:
      static_cast<uint8_t*>(data)[index] = static_cast<uint8_t>(detail::encode_bits(kE5m2, 5, rounded));
      break;
    case OCTET_I8:
    case OCTET_I4:
      static_cast<int8_t*>(data)[index] = static_cast<int8_t>(rounded);
      break;
    case OCTET_U8:
    case OCTET_BOOL:
      static_cast<uint8_t*>(data)[index] = static_cast<uint8_t>(rounded);
      break;
    case OCTET_I32:
      static_cast<int32_t*>(data)[index] = static_cast<int32_t>(rounded);
      break;
    default:
      break;
  }
}

}  // namespace octet
