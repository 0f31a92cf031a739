// The residual of o in one byte: the eight bits of the un-rounded o that follow those of a 16- or 8-bit o.
//
// Numbers of f32, read as integers, are in the order of their magnitudes and evenly spaced within a binade, so that o
// and its residual are one number of more digits:
//
//   bits(o + residual) = bits(o) + residual 2^shift,   shift = 15 - the digits of o's type
//
// where bits() is a number's representation in f32. In bf16, o and the residual are the first 24 bits, rounded to
// nearest. The residual is within [-127, 127]: a tie, which rounding to even moves up as often as down, loses a unit
// either way. With -128 only what was rounded up would be exact, and delta would be biased in rows of ties. Below 2^-14
// f16 has fewer digits, and the residual saturates.
#pragma once
#include <octet/octet.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace octet {

// Returns true if an o of this type may have a residual in one byte. Types of 32 and 64 bits have no use for it.
constexpr bool has_byte_residual(octet_dtype o) { return o == OCTET_BF16 || o == OCTET_F16 || o == OCTET_E4M3; }

// Returns log2 of the residual's unit in steps of f32.
constexpr int residual_shift(octet_dtype o) { return o == OCTET_BF16 ? 8 : o == OCTET_F16 ? 5 : 12; }

// Returns the residual of `exact`, which was rounded to `rounded`, to nearest and saturated.
inline int8_t residual_of(float exact, float rounded, int shift) {
  const int64_t steps = int64_t{std::bit_cast<int32_t>(exact)} - std::bit_cast<int32_t>(rounded);
  return static_cast<int8_t>(std::clamp<int64_t>((steps + (int64_t{1} << (shift - 1))) >> shift, -127, 127));
}

// Returns what was rounded to `rounded`. What became infinite stays so.
inline float with_residual(float rounded, int8_t residual, int shift) {
  if (!std::isfinite(rounded)) return rounded;
  const auto steps = static_cast<uint32_t>(residual) << shift;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(rounded) + steps);
}

}  // namespace octet
