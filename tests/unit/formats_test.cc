// Element types against the definition of a binary float, read digit by digit: every code of the narrow ones, and what
// lies halfway between two.
#include <gtest/gtest.h>

#include <octet/formats.hpp>

namespace octet {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double independent_value(uint32_t code, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(code >> mantissa_bits) & ((1 << exponent_bits) - 1);
  double fraction = exponent ? 1.0 : 0.0;
  for (int bit = 1; bit <= mantissa_bits; ++bit)
    if (code >> (mantissa_bits - bit) & 1) fraction += std::pow(2.0, -bit);
  const bool ones = (code & ((1u << mantissa_bits) - 1)) == (1u << mantissa_bits) - 1,
             top = exponent == (1 << exponent_bits) - 1;
  double value = fraction * std::pow(2.0, (exponent ? exponent : 1) - bias);
  if (top && has_infinity) value = fraction == 1.0 ? kInf : kNaN;
  if (top && !has_infinity && ones) value = kNaN;
  return code >> (exponent_bits + mantissa_bits) ? -value : value;
}

void expect_format(octet_dtype dtype, int bits, int exponent_bits, int mantissa_bits, bool has_infinity) {
  double below = kNaN;
  for (uint32_t code = 0; code < 1u << bits; ++code) {
    uint16_t wide = static_cast<uint16_t>(code);
    uint8_t narrow = static_cast<uint8_t>(code);
    void* memory = bits == 16 ? static_cast<void*>(&wide) : &narrow;
    const double value = independent_value(code, exponent_bits, mantissa_bits, has_infinity),
                 loaded = load(dtype, memory, 0);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(loaded) && std::isnan(round_to(dtype, loaded))) << code;
      below = kNaN;
      continue;
    }
    EXPECT_EQ(loaded, value) << code;
    if (std::isinf(value) && dtype == OCTET_E5M2) continue;  // read, never written: conversion saturates
    EXPECT_EQ(round_to(dtype, value), value) << code;
    store(dtype, memory, 0, value);
    EXPECT_EQ(bits == 16 ? wide : narrow, code);
    if (std::isfinite(value) && std::isfinite(below) && std::signbit(value) == std::signbit(below)) {
      const double middle = (below + value) / 2, even = code % 2 ? below : value;
      EXPECT_EQ(round_to(dtype, middle), even) << code;
      EXPECT_EQ(round_to(dtype, std::nextafter(middle, below)), below) << code;
      EXPECT_EQ(round_to(dtype, std::nextafter(middle, value)), value) << code;
    }
    below = value;
  }
}

TEST(Formats, f16) { expect_format(OCTET_F16, 16, 5, 10, true); }
TEST(Formats, bf16) { expect_format(OCTET_BF16, 16, 8, 7, true); }
TEST(Formats, e4m3) { expect_format(OCTET_E4M3, 8, 4, 3, false); }
TEST(Formats, e5m2) { expect_format(OCTET_E5M2, 8, 5, 2, true); }

}  // namespace
}  // namespace octet
