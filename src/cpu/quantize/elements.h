// Rows of 16- and 8-bit floats to and from float, without branches, so that they vectorise on any machine. Bit for
// bit the conversions of octet/formats.hpp (tests/unit/quantize_test.cc), which are written to be read instead.
#pragma once
#include <array>
#include <octet/formats.hpp>

#include "core/problem.h"

namespace octet {

static inline float bf16_value(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

static inline uint16_t bf16_bits(float x) {
  const auto u = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return static_cast<uint16_t>(x == x ? rounded : u >> 16 | 0x40);  // NaN stays quiet
}

static inline float f16_value(uint16_t bits) {
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fff) << 13;  // as a float: too small by 2^112
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  const uint32_t finite = std::bit_cast<uint32_t>(scaled);
  const uint32_t value = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite;
  return std::bit_cast<float>(value | static_cast<uint32_t>(bits & 0x8000) << 16);
}

// Bits of the float nearest to x with `kMantissa` stored bits and smallest normal number 2^kMinExponent, |x| being
// at most its largest number: normal numbers lose mantissa bits of the float, subnormal ones are multiples of a unit.
template <int kMantissa, int kMinExponent>
static inline uint32_t small_float_magnitude(float magnitude) {
  constexpr int kDropped = 23 - kMantissa;
  constexpr uint32_t kBias = static_cast<uint32_t>(127 + kMinExponent - 1) << kMantissa;
  const auto u = std::bit_cast<uint32_t>(magnitude);
  const uint32_t normal = ((u + (1u << (kDropped - 1)) - 1 + (u >> kDropped & 1)) >> kDropped) - kBias;
  const float unit_magic = std::bit_cast<float>(static_cast<uint32_t>(127 + kMinExponent - kMantissa + 23) << 23);
  const uint32_t subnormal = std::bit_cast<uint32_t>(magnitude + unit_magic) - std::bit_cast<uint32_t>(unit_magic);
  return u < static_cast<uint32_t>(127 + kMinExponent) << 23 ? subnormal : normal;
}

static inline uint16_t f16_bits(float x) {
  const uint32_t sign = std::bit_cast<uint32_t>(x) >> 16 & 0x8000;
  const float a = std::fabs(x);
  const uint32_t finite = small_float_magnitude<10, -14>(a < 65520.f ? a : 0.f);
  return static_cast<uint16_t>(sign | (a < 65520.f ? finite : a == a ? 0x7c00u : 0x7e00u));
}

// e4m3 and e5m2 saturate. NaN, which the quantizers never keep, gives 0.
template <int kMantissa, int kMinExponent>
static inline void encode_fp8(const float* x, int64_t n, float largest, uint8_t* out) {
  for (int64_t c = 0; c < n; ++c) {
    const float value = x[c] == x[c] ? x[c] : 0.f;
    const uint32_t sign = std::bit_cast<uint32_t>(value) >> 24 & 0x80;
    const float a = std::fabs(value);
    out[c] = static_cast<uint8_t>(sign | small_float_magnitude<kMantissa, kMinExponent>(a < largest ? a : largest));
  }
}
static inline void encode_e4m3(const float* x, int64_t n, uint8_t* out) { encode_fp8<3, -6>(x, n, 448.f, out); }
static inline void encode_e5m2(const float* x, int64_t n, uint8_t* out) { encode_fp8<2, -14>(x, n, 57344.f, out); }

// The numbers that the 256 bytes of an 8-bit dtype stand for.
static inline std::array<float, 256> decode_table(octet_dtype dtype) {
  const auto value = [dtype](uint8_t byte) -> double {
    switch (dtype) {
      case OCTET_E4M3:
        return detail::decode_bits(kE4m3, 4, byte);
      case OCTET_E5M2:
        return detail::decode_bits(kE5m2, 5, byte);
      case OCTET_U8:
        return byte;
      default:
        return static_cast<int8_t>(byte);  // i8, i4
    }
  };
  std::array<float, 256> values;
  for (int i = 0; i < 256; ++i) values[i] = static_cast<float>(value(static_cast<uint8_t>(i)));
  return values;
}

namespace detail {

// Applies `convert` to the elements of a row. The contiguous loop is apart, because it vectorises.
template <class From, class To, class Convert>
static inline void convert_row(const From* from, int64_t from_stride, To* to, int64_t to_stride, int64_t n,
                               Convert convert) {
  if (from_stride == 1 && to_stride == 1)
    for (int64_t c = 0; c < n; ++c) to[c] = convert(from[c]);
  else
    for (int64_t c = 0; c < n; ++c) to[c * to_stride] = convert(from[c * from_stride]);
}

}  // namespace detail

// row[c] = x[b, h, t, c], for floating-point x; T is float or double.
template <class T>
static inline void load_row(const View& x, int64_t b, int64_t h, int64_t t, T* row) {
  const auto from = [&](const auto* data, auto convert) {
    detail::convert_row(data + x.offset(b, h, t), x.stride[3], row, 1, x.shape[3], convert);
  };
  switch (x.dtype) {
    case OCTET_F64:
      return from(static_cast<const double*>(x.data), [](double v) { return static_cast<T>(v); });
    case OCTET_F32:
      return from(static_cast<const float*>(x.data), [](float v) { return static_cast<T>(v); });
    case OCTET_F16:
      return from(static_cast<const uint16_t*>(x.data), [](uint16_t v) { return static_cast<T>(f16_value(v)); });
    case OCTET_BF16:
      return from(static_cast<const uint16_t*>(x.data), [](uint16_t v) { return static_cast<T>(bf16_value(v)); });
    default: {
      static const std::array<float, 256> values = decode_table(OCTET_E4M3);
      return from(static_cast<const uint8_t*>(x.data), [](uint8_t v) { return static_cast<T>(values[v]); });
    }
  }
}

// x[b, h, t, c] = row[c], rounded to f64, f32, f16 or bf16.
template <class T>
static inline void store_row(const T* row, const View& x, int64_t b, int64_t h, int64_t t) {
  const auto to = [&](auto* data, auto convert) {
    detail::convert_row(row, 1, data + x.offset(b, h, t), x.stride[3], x.shape[3], convert);
  };
  switch (x.dtype) {
    case OCTET_F64:
      return to(static_cast<double*>(x.data), [](T v) { return static_cast<double>(v); });
    case OCTET_F32:
      return to(static_cast<float*>(x.data), [](T v) { return static_cast<float>(v); });
    case OCTET_F16:
      return to(static_cast<uint16_t*>(x.data), [](T v) { return f16_bits(static_cast<float>(v)); });
    default:
      return to(static_cast<uint16_t*>(x.data), [](T v) { return bf16_bits(static_cast<float>(v)); });
  }
}

}  // namespace octet
