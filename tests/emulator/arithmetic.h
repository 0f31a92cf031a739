// Arithmetic of single numbers as PTX defines it (PTX ISA, chapter 9.7).
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

namespace emulator {

using u8 = uint8_t;
using s8 = int8_t;
using u16 = uint16_t;
using s16 = int16_t;
using u32 = uint32_t;
using s32 = int32_t;
using u64 = uint64_t;
using s64 = int64_t;
using f32 = float;
using f64 = double;

// Arithmetic wraps around.
template <class T>
using Wrapping = std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::type_identity<T>>::type;

constexpr auto add = []<class T>(T a, T b) {
  return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
};
constexpr auto subtract = []<class T>(T a, T b) {
  return static_cast<T>(static_cast<Wrapping<T>>(a) - static_cast<Wrapping<T>>(b));
};
constexpr auto multiply = []<class T>(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<u64>(a) * static_cast<u64>(b));
  else
    return a * b;
};
constexpr auto reversed_bits = [](u32 a) {
  u32 reversed = 0;
  for (int i = 0; i < 32; ++i) reversed = reversed << 1 | (a >> i & 1);
  return reversed;
};
// cvt.pack.sat.{s8, u8}.s32.b32: a and b become the lower bytes, b the lowest, and those of c move up.
template <s32 low, s32 high>
constexpr auto pack_bytes = [](s32 a, s32 b, u32 c) {
  const auto byte = [](s32 x) { return static_cast<u32>(static_cast<u8>(std::clamp(x, low, high))); };
  return c << 16 | byte(a) << 8 | byte(b);
};
constexpr auto multiply_high = []<class T>(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return static_cast<T>((static_cast<Wide>(a) * static_cast<Wide>(b)) >> (8 * sizeof(T)));
};
constexpr auto divide = []<class T>(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    if (b == 0) return std::numeric_limits<T>::max();
    if constexpr (std::is_signed_v<T>)
      if (b == -1) return subtract(T{0}, a);
  }
  return static_cast<T>(a / b);
};
constexpr auto remainder = []<class T>(T a, T b) {
  if (b == 0) return a;
  if constexpr (std::is_signed_v<T>)
    if (b == -1) return T{0};
  return static_cast<T>(a % b);
};
// A NaN loses to a number.
constexpr auto minimum = []<class T>(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return std::fmin(a, b);
  else
    return a < b ? a : b;
};
constexpr auto maximum = []<class T>(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return std::fmax(a, b);
  else
    return a > b ? a : b;
};
constexpr auto maximum_or_nan = [](f32 a, f32 b) { return a != a ? a : b != b ? b : a > b ? a : b; };
constexpr auto bit_and = []<class T>(T a, T b) { return static_cast<T>(a & b); };
constexpr auto bit_or = []<class T>(T a, T b) { return static_cast<T>(a | b); };
constexpr auto bit_xor = []<class T>(T a, T b) { return static_cast<T>(a ^ b); };
constexpr auto bit_not = []<class T>(T a) { return static_cast<T>(~a); };
constexpr auto shift_left = []<class T>(T a, u32 n) {
  return static_cast<T>(n < 8 * sizeof(T) ? static_cast<Wrapping<T>>(a) << n : 0);
};
constexpr auto shift_right = []<class T>(T a, u32 n) {
  constexpr u32 kMost = 8 * sizeof(T) - 1;
  if constexpr (std::is_signed_v<T>)
    return static_cast<T>(a >> (n < kMost ? n : kMost));
  else
    return static_cast<T>(n <= kMost ? a >> n : 0);
};
constexpr auto negate = []<class T>(T a) { return static_cast<T>(-static_cast<Wrapping<T>>(a)); };
constexpr auto absolute = []<class T>(T a) {
  if constexpr (std::is_floating_point_v<T>)
    return std::fabs(a);
  else
    return a < 0 ? negate(a) : a;
};
constexpr auto copy = []<class T>(T a) { return a; };
constexpr auto select = []<class T>(T a, T b, u8 p) { return p ? a : b; };
constexpr auto join_32 = [](u16 a, u16 b) { return static_cast<u32>(b) << 16 | a; };
constexpr auto join_64 = [](u32 a, u32 b) { return static_cast<u64>(b) << 32 | a; };
// The product is exact in f64, and so is the sum unless the numbers differ by 2^29.
constexpr auto multiply_add_down = [](f32 a, f32 b, f32 c) {
  const f64 exact = static_cast<f64>(a) * b + c;
  const f32 nearest = static_cast<f32>(exact);
  return nearest > exact ? std::nextafter(nearest, -std::numeric_limits<f32>::infinity()) : nearest;
};
// Division by an approximate instruction is as exact here as the format allows.
constexpr auto power_of_two = [](f32 a) { return std::exp2(a); };
// .ftz: a subnormal result or operand is 0.
constexpr auto flush = [](f32 a) { return std::fabs(a) < std::numeric_limits<f32>::min() ? std::copysign(0.f, a) : a; };
constexpr auto power_of_two_flushed = [](f32 a) { return flush(std::exp2(flush(a))); };

// Numbers of 16 bits.
inline float from_f16(u16 h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  float magnitude = exponent == 31
                        ? (fraction ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity())
                    : exponent ? std::ldexp(1024.f + fraction, exponent - 25)
                               : std::ldexp(static_cast<float>(fraction), -24);
  return h >> 15 ? -magnitude : magnitude;
}
inline const float* f16_table() {
  static const std::vector<float> table = [] {
    std::vector<float> t(1 << 16);
    for (u32 i = 0; i < t.size(); ++i) t[i] = from_f16(static_cast<u16>(i));
    return t;
  }();
  return table.data();
}
inline float from_bf16(u16 b) { return std::bit_cast<float>(static_cast<u32>(b) << 16); }
inline u16 to_bf16(float x) {
  if (x != x) return 0x7fff;
  const u32 bits = std::bit_cast<u32>(x);
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
template <class T>
u16 to_f16(T x) {
  if (x != x) return 0x7fff;
  const u16 sign = std::signbit(x) ? 0x8000 : 0;
  const T magnitude = std::fabs(x);
  if (magnitude >= T{65520}) return sign | 0x7c00;
  int exponent = std::max(std::ilogb(magnitude == 0 ? T(1e-30) : magnitude), -14);
  // Units of the last place, rounded to nearest even.
  const u32 units = static_cast<u32>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return sign | static_cast<u16>(units + (exponent + 14) * 1024);
}

// Numbers of e4m3, whose largest is 448 and which has no infinity.
inline float from_e4m3(u8 code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const float magnitude = exponent == 15 && fraction == 7 ? std::numeric_limits<float>::quiet_NaN()
                          : exponent ? std::ldexp(8.f + static_cast<float>(fraction), exponent - 10)
                                     : std::ldexp(static_cast<float>(fraction), -9);
  return code >> 7 ? -magnitude : magnitude;
}
inline u8 to_e4m3(float x) {
  if (x != x) return 0x7f;
  const u8 sign = std::signbit(x) ? 0x80 : 0;
  const float magnitude = std::min(std::fabs(x), 448.f);
  const int exponent = std::max(std::ilogb(magnitude == 0.f ? 0x1p-9f : magnitude), -6);
  // Units of the last place, rounded to nearest even.
  const int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  return sign | static_cast<u8>(units + (exponent + 6) * 8);
}

template <class D>
D saturated(double x) {  // NaN becomes 0
  if (!(x == x)) return 0;
  if (x <= static_cast<double>(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
  if (x >= static_cast<double>(std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
  return static_cast<D>(x);
}

// The low `bits` of a value, sign-extended where the type has a sign.
inline u64 extended(u64 value, u8 bytes, bool has_sign) {
  const int unused = 64 - 8 * bytes;
  return has_sign ? static_cast<u64>(static_cast<s64>(value << unused) >> unused) : value << unused >> unused;
}

// Tensor cores add without rounding each sum, and truncate.
inline float truncated(double x) {
  const float nearest = static_cast<float>(x);
  if (!(std::fabs(x) <= std::numeric_limits<float>::max()) || std::fabs(static_cast<double>(nearest)) <= std::fabs(x))
    return nearest;
  return std::nextafter(nearest, 0.f);
}

}  // namespace emulator
