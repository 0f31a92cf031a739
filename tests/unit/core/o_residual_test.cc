// Tests the residual of o in one byte: with it, o has eight more bits, in every binade and at every edge.
#include "core/o_residual.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <octet/formats.hpp>
#include <random>

namespace octet {
namespace {

struct Type {
  octet_dtype dtype;
  int digits, least_exponent;  // of the smallest normal number
};
constexpr Type kTypes[] = {{OCTET_BF16, 7, -126}, {OCTET_F16, 10, -14}, {OCTET_E4M3, 3, -6}};

float rounded(octet_dtype type, float x) { return static_cast<float>(round_to(type, x)); }

float completed(octet_dtype type, float x) {
  const float o = rounded(type, x);
  return with_residual(o, residual_of(x, o, residual_shift(type)), residual_shift(type));
}

TEST(OResidual, adds_eight_bits) {
  std::mt19937_64 bits(1);
  for (const Type& t : kTypes)
    for (int exponent = t.least_exponent; exponent < 8; ++exponent)
      for (int i = 0; i < 2000; ++i) {
        const float sign = bits() % 2 ? 1.f : -1.f;
        const float x = sign * std::ldexp(1.f + static_cast<float>(bits() % (1 << 23)) * 0x1p-23f, exponent);
        // Half a unit, or a whole one where the residual saturates: half way between two numbers of o's type.
        const float unit = std::ldexp(1.f, exponent - t.digits - 8);
        const float lost = std::fabs(x - rounded(t.dtype, x));
        const float allowed = lost > 127.f * unit ? unit : unit / 2;
        ASSERT_LE(std::fabs(completed(t.dtype, x) - x), allowed) << x << " as " << t.dtype;
      }
}

TEST(OResidual, of_numbers_that_rounding_keeps_is_0) {
  for (const Type& t : kTypes)
    for (int i = 0; i < 1 << 16; ++i) {
      const float x = rounded(t.dtype, std::bit_cast<float>(static_cast<uint32_t>(i) << 16));
      if (std::isnan(x)) continue;
      EXPECT_EQ(residual_of(x, x, residual_shift(t.dtype)), 0);
      EXPECT_EQ(std::bit_cast<uint32_t>(with_residual(x, 0, residual_shift(t.dtype))), std::bit_cast<uint32_t>(x));
    }
}

// A tie is rounded to an even last digit, up or down, and the residual of either loses a unit.
TEST(OResidual, completes_ties_of_both_kinds) {
  for (const Type& t : kTypes)
    for (const int n : {1, 3, 5, 7}) {
      const float x = 1.f + static_cast<float>(n) * std::ldexp(1.f, -t.digits - 1), o = rounded(t.dtype, x);
      ASSERT_NE(x, o);
      EXPECT_EQ(residual_of(x, o, residual_shift(t.dtype)), o < x ? 127 : -127) << n << " as " << t.dtype;
      EXPECT_EQ(completed(t.dtype, x), x + std::ldexp(o < x ? -1.f : 1.f, -t.digits - 8));
    }
}

TEST(OResidual, crosses_a_power_of_two) {
  for (const Type& t : kTypes) {
    const float x = std::nextafter(2.f, 0.f);
    ASSERT_EQ(rounded(t.dtype, x), 2.f);
    EXPECT_EQ(completed(t.dtype, x), 2.f);
    const float y = 2.f - std::ldexp(1.f, -t.digits - 2);
    ASSERT_EQ(rounded(t.dtype, y), 2.f);
    EXPECT_EQ(completed(t.dtype, y), y);
  }
}

TEST(OResidual, keeps_zeros_infinities_and_nans) {
  for (const Type& t : kTypes) {
    EXPECT_EQ(std::bit_cast<uint32_t>(completed(t.dtype, 0.f)), 0u);
    EXPECT_EQ(std::bit_cast<uint32_t>(completed(t.dtype, -0.f)), 0x80000000u);
    EXPECT_TRUE(std::isnan(completed(t.dtype, std::numeric_limits<float>::quiet_NaN())));
    if (t.dtype == OCTET_E4M3) continue;  // it saturates
    EXPECT_EQ(completed(t.dtype, std::numeric_limits<float>::infinity()), std::numeric_limits<float>::infinity());
    EXPECT_EQ(completed(t.dtype, -std::numeric_limits<float>::infinity()), -std::numeric_limits<float>::infinity());
  }
}

TEST(OResidual, leaves_an_o_infinite_that_overflowed) {
  EXPECT_EQ(completed(OCTET_F16, 65530.f), std::numeric_limits<float>::infinity());
  EXPECT_EQ(completed(OCTET_BF16, -std::numeric_limits<float>::max()), -std::numeric_limits<float>::infinity());
}

// Below its smallest normal number f16 has fewer digits, and bf16 those of f32: the error is never larger than without
// a residual, and in bf16 as small as elsewhere.
TEST(OResidual, completes_subnormals) {
  std::mt19937_64 bits(2);
  for (int i = 0; i < 100000; ++i) {
    const auto x = std::bit_cast<float>(static_cast<uint32_t>(bits() % (1 << 23)));
    EXPECT_LE(std::fabs(completed(OCTET_BF16, x) - x), std::ldexp(1.f, -141)) << x;
    const float y = 0x1p-14f * static_cast<float>(bits() % (1 << 23)) * 0x1p-23f;
    EXPECT_LE(std::fabs(completed(OCTET_F16, y) - y), std::fabs(rounded(OCTET_F16, y) - y)) << y;
  }
}

}  // namespace
}  // namespace octet
