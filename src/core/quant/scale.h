// The scales of 8-bit operands, and rounding to integers. The quantizers and the prologues of the attention kernels
// share this arithmetic, so that both produce the same bits on every instruction set: the order of operations is fixed,
// and no product is rounded differently when a compiler contracts it with a sum into one fused operation.
//
// Every function is `static`: kernels are compiled once per instruction set, and a shared inline function would
// leave the linker free to keep the AVX-512 copy for everybody.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace octet {

// Largest magnitude; NaN if any element is NaN. Magnitudes order as their bits do, and NaN lies above infinity:
// unlike fmax, which drops NaN, an integer maximum keeps it, and vectorises.
static inline float amax(const float* x, int64_t n) {
  int32_t top = 0;
  for (int64_t c = 0; c < n; ++c) {
    const int32_t magnitude = std::bit_cast<int32_t>(x[c]) & 0x7fffffff;
    top = magnitude > top ? magnitude : top;
  }
  return std::bit_cast<float>(top);
}

// Numbers far beyond the others would spoil a mean for all its tokens. In means of k and v, and of q in blocks, numbers
// of this size and above count as 0, as those that are not finite do: 2^(E + 4), with E the lower quartile of the
// exponents of the largest finite magnitudes of a sample of tokens; tokens of zeros are left out. `largest`: those
// magnitudes, which lose their order; no token: 0.
constexpr int64_t kSampledTokens = 64;  // at most; of n tokens the (i n / sampled)-th
static inline float mean_limit(float* largest, int64_t tokens) {
  float* const last = std::remove(largest, largest + tokens, 0.f);
  if (last == largest) return 0.f;
  float* const quartile = largest + (last - largest - 1) / 4;
  std::nth_element(largest, quartile, last);
  const uint32_t exponent = std::bit_cast<uint32_t>(*quartile) >> 23;
  return std::bit_cast<float>(std::min((exponent > 1 ? exponent : 1) + 4, 255u) << 23);
}

// A symmetric scale and its inverse for quantized values up to `top`: x ~ scale * value, scale = amax / top.
//  - amax 0: 0 and 0, all values are 0.
//  - amax inf or NaN: NaN and 0, so that every number of the group comes back as NaN instead of as a wrong one.
//  - amax below 2^-110 counts as 2^-110, so that neither the scale is subnormal nor its inverse infinite.
struct Scale {
  float scale, inverse;
};
static constexpr Scale scale_of(float amax, float top) {
  constexpr float kSmallest = 0x1p-110f;
  if (amax == 0.f) return {0.f, 0.f};
  if (!(amax <= std::numeric_limits<float>::max())) return {std::numeric_limits<float>::quiet_NaN(), 0.f};
  const float range = amax > kSmallest ? amax : kSmallest;
  return {range / top, top / range};
}

// The integer nearest to x, ties to even, as a float; |x| <= 2^22. 1.5 * 2^23 has units in its last place. Whoever
// passes a product clamps it first: a fused product would be rounded once instead of twice.
constexpr float kRoundingMagic = 0x1.8p23f;
static constexpr float nearest_even(float x) { return (x + kRoundingMagic) - kRoundingMagic; }

// The integer nearest to x within [low, high], ties to even, modulo 256; NaN gives 0.
static constexpr uint8_t integer_bits(float x, float low, float high) {
  float r = x == x ? x : 0.f;
  r = r > low ? r : low;
  r = r < high ? r : high;
  return static_cast<uint8_t>(std::bit_cast<uint32_t>(r + kRoundingMagic));
}
static inline void encode_integers(const float* x, int64_t n, float low, float high, uint8_t* out) {
  for (int64_t c = 0; c < n; ++c) out[c] = integer_bits(x[c], low, high);
}

}  // namespace octet
