// Numbers of 16 and 8 bits to and from float, without branches, so that they vectorise on any machine. Bit for bit the
// conversions of octet/formats.hpp (tests/unit/quantize_test.cc), which are written to be read instead. The quantizers
// of the CPU and of the GPU share them: constexpr functions run on both.
#pragma once
#include <octet/octet.h>

#include <bit>
#include <cstdint>
#include <limits>

namespace octet {

// These are constexpr, which those of <cmath> are not.
static constexpr float magnitude_of(float x) { return std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0x7fffffffu); }
static constexpr bool is_finite(float x) { return magnitude_of(x) <= std::numeric_limits<float>::max(); }

static constexpr float bf16_value(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

static constexpr uint16_t bf16_bits(float x) {
  const auto u = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return static_cast<uint16_t>(x == x ? rounded : u >> 16 | 0x40);  // NaN stays quiet
}

static constexpr float f16_value(uint16_t bits) {
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fff) << 13;  // as a float: too small by 2^112
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  const uint32_t finite = std::bit_cast<uint32_t>(scaled);
  const uint32_t value = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite;
  return std::bit_cast<float>(value | static_cast<uint32_t>(bits & 0x8000) << 16);
}

// Bits of the float nearest to x with `kMantissa` stored bits and smallest normal number 2^kMinExponent, |x| being
// at most its largest number: normal numbers lose mantissa bits of the float, subnormal ones are multiples of a unit.
template <int kMantissa, int kMinExponent>
static constexpr uint32_t small_float_magnitude(float magnitude) {
  constexpr int kDropped = 23 - kMantissa;
  constexpr uint32_t kBias = static_cast<uint32_t>(127 + kMinExponent - 1) << kMantissa;
  const auto u = std::bit_cast<uint32_t>(magnitude);
  const uint32_t normal = ((u + (1u << (kDropped - 1)) - 1 + (u >> kDropped & 1)) >> kDropped) - kBias;
  const float unit_magic = std::bit_cast<float>(static_cast<uint32_t>(127 + kMinExponent - kMantissa + 23) << 23);
  const uint32_t subnormal = std::bit_cast<uint32_t>(magnitude + unit_magic) - std::bit_cast<uint32_t>(unit_magic);
  return u < static_cast<uint32_t>(127 + kMinExponent) << 23 ? subnormal : normal;
}

static constexpr uint16_t f16_bits(float x) {
  const uint32_t sign = std::bit_cast<uint32_t>(x) >> 16 & 0x8000;
  const float a = magnitude_of(x);
  const uint32_t finite = small_float_magnitude<10, -14>(a < 65520.f ? a : 0.f);
  return static_cast<uint16_t>(sign | (a < 65520.f ? finite : a == a ? 0x7c00u : 0x7e00u));
}

// e4m3 and e5m2 saturate. NaN, which the quantizers never keep, gives 0.
template <int kMantissa, int kMinExponent>
static constexpr uint8_t fp8_bits(float x, float largest) {
  const float value = x == x ? x : 0.f;
  const uint32_t sign = std::bit_cast<uint32_t>(value) >> 24 & 0x80;
  const float a = magnitude_of(value);
  return static_cast<uint8_t>(sign | small_float_magnitude<kMantissa, kMinExponent>(a < largest ? a : largest));
}
static constexpr uint8_t e4m3_bits(float x) { return fp8_bits<3, -6>(x, 448.f); }
static constexpr uint8_t e5m2_bits(float x) { return fp8_bits<2, -14>(x, 57344.f); }

// As a float, a number of e4m3 is too small by 2^120, one of e5m2 by 2^112.
static constexpr float e4m3_value(uint8_t bits) {
  const uint32_t magnitude = bits & 0x7fu, sign = static_cast<uint32_t>(bits & 0x80) << 24;
  const float scaled = std::bit_cast<float>(magnitude << 20) * 0x1p120f;
  return std::bit_cast<float>((magnitude == 0x7f ? 0x7fc00000u : std::bit_cast<uint32_t>(scaled)) | sign);
}
static constexpr float e5m2_value(uint8_t bits) {
  const uint32_t magnitude = bits & 0x7fu, sign = static_cast<uint32_t>(bits & 0x80) << 24;
  const float scaled = std::bit_cast<float>(magnitude << 21) * 0x1p112f;
  const uint32_t special = magnitude == 0x7c ? 0x7f800000u : 0x7fc00000u;
  return std::bit_cast<float>((magnitude >= 0x7c ? special : std::bit_cast<uint32_t>(scaled)) | sign);
}

// The number that a byte of an 8-bit dtype stands for.
static constexpr float byte_value(octet_dtype dtype, uint8_t byte) {
  switch (dtype) {
    case OCTET_E4M3:
      return e4m3_value(byte);
    case OCTET_E5M2:
      return e5m2_value(byte);
    case OCTET_U8:
      return byte;
    default:
      return static_cast<int8_t>(byte);  // i8, i4
  }
}

}  // namespace octet
