// Arithmetic on one row of a tensor, shared by the quantisers and by the prologues of the attention kernels, so
// that both produce the same bits on every instruction set: the order of operations is fixed, and no product is
// rounded differently when a compiler contracts it with a sum into one fused operation.
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

// Seed of the random signs that attention uses when it rotates q and k itself.
constexpr uint64_t kHadamardSeed = 0x6f63746574;  // "octet"

// log(exp(lse) + exp(sink)): what a sink makes of the lse of a row's keys. A sink that is NaN or +inf makes it NaN, as
// such a logit would; one of -inf is none.
static inline double with_sink(double lse, double sink) {
  if (!(sink < std::numeric_limits<double>::infinity())) return std::numeric_limits<double>::quiet_NaN();
  if (lse != lse) return lse;
  const double low = std::fmin(lse, sink), high = std::fmax(lse, sink);
  return low == -std::numeric_limits<double>::infinity() ? high : high + std::log1p(std::exp(low - high));
}

// exp(x - lse), the weight of a logit; 0 where the logit is -inf, whatever lse is.
static inline double weight_of(double x, double lse) {
  return x == -std::numeric_limits<double>::infinity() ? 0.0 : std::exp(x - lse);
}

// Size of the Hadamard blocks along a row: the largest power of two that divides dim.
static constexpr int64_t hadamard_block(int64_t dim) { return dim & -dim; }

// Sign of channel c: bit 63 of splitmix64(seed + c), as +1 or -1.
static inline float hadamard_sign(uint64_t seed, int64_t c) {
  uint64_t z = seed + 0x9e3779b97f4a7c15u * (static_cast<uint64_t>(c) + 1);
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return (z ^ z >> 31) >> 63 ? -1.f : 1.f;
}

// One stage of butterflies at distance `half`, in runs of kWidth that become vector instructions; half is a multiple of
// it.
template <int kWidth>
static inline void hadamard_stage(float* x, int64_t dim, int64_t half) {
  for (int64_t start = 0; start < dim; start += 2 * half)
    for (int64_t run = start; run < start + half; run += kWidth)
      for (int64_t c = run; c < run + kWidth; ++c) {
        const float a = x[c], b = x[c + half];
        x[c] = a + b;
        x[c + half] = a - b;
      }
}

// x <- H x, un-normalised, for each block of a row: stages at distance 1, 2, 4, ...
static inline void hadamard_butterflies(float* x, int64_t dim) {
  const int64_t block = hadamard_block(dim);
  if (block > 1) hadamard_stage<1>(x, dim, 1);
  if (block > 2) hadamard_stage<2>(x, dim, 2);
  if (block > 4) hadamard_stage<4>(x, dim, 4);
  if (block > 8) hadamard_stage<8>(x, dim, 8);
  for (int64_t half = 16; half < block; half *= 2) hadamard_stage<16>(x, dim, half);
}

// x <- H D x / sqrt(block), block-diagonal, with D = diag(signs): orthogonal, so q.k is unchanged when both are
// rotated (incoherent processing, FlashAttention-3, arXiv 2407.08608, section 3.3).
static inline void hadamard(float* x, const float* signs, int64_t dim) {
  for (int64_t c = 0; c < dim; ++c) x[c] *= signs[c];
  hadamard_butterflies(x, dim);
  const float norm = 1.f / std::sqrt(static_cast<float>(hadamard_block(dim)));
  for (int64_t c = 0; c < dim; ++c) x[c] *= norm;
}

// x <- D H^T x / sqrt(block): the inverse.
static inline void hadamard_inverse(float* x, const float* signs, int64_t dim) {
  hadamard_butterflies(x, dim);
  const float norm = 1.f / std::sqrt(static_cast<float>(hadamard_block(dim)));
  for (int64_t c = 0; c < dim; ++c) x[c] *= norm * signs[c];
}

// Rotates the pairs (c, c + pairs) of a row by the angles whose cosines and sines are given. Products are taken in
// double: those of two floats are exact there.
template <class T>
static inline void rope_half(T* x, const T* cosine, const T* sine, int64_t pairs) {
  T* y = x + pairs;
  for (int64_t c = 0; c < pairs; ++c) {
    const double a = x[c], b = y[c], p = cosine[c], q = sine[c];
    x[c] = static_cast<T>(a * p - b * q);
    y[c] = static_cast<T>(a * q + b * p);
  }
}

// The same for the pairs (2c, 2c + 1).
template <class T>
static inline void rope_interleaved(T* x, const T* cosine, const T* sine, int64_t pairs) {
  for (int64_t c = 0; c < pairs; ++c) {
    const double a = x[2 * c], b = x[2 * c + 1], p = cosine[c], q = sine[c];
    x[2 * c] = static_cast<T>(a * p - b * q);
    x[2 * c + 1] = static_cast<T>(a * q + b * p);
  }
}

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

// A symmetric scale and its inverse for codes up to `top`: x ~ step * code, step = amax / top.
//  - amax 0: 0 and 0, all codes are 0.
//  - amax inf or NaN: NaN and 0, so that every number of the group comes back as NaN instead of as a wrong one.
//  - amax below 2^-110 counts as 2^-110, so that neither the step is subnormal nor its inverse infinite.
struct Step {
  float step, inverse;
};
static inline Step step_of(float amax, float top) {
  constexpr float kSmallest = 0x1p-110f;
  if (amax == 0.f) return {0.f, 0.f};
  if (!(amax <= std::numeric_limits<float>::max())) return {std::numeric_limits<float>::quiet_NaN(), 0.f};
  const float range = amax > kSmallest ? amax : kSmallest;
  return {range / top, top / range};
}

// The integer nearest to x, ties to even, as a float; |x| <= 2^22. 1.5 * 2^23 has units in its last place. Whoever
// passes a product clamps it first: a fused product would be rounded once instead of twice.
constexpr float kRoundingMagic = 0x1.8p23f;
static inline float nearest_even(float x) { return (x + kRoundingMagic) - kRoundingMagic; }

// codes[c] = the integer nearest to x[c] within [low, high], ties to even, modulo 256; NaN gives 0.
static inline void integer_codes(const float* x, int64_t n, float low, float high, uint8_t* codes) {
  for (int64_t c = 0; c < n; ++c) {
    float r = x[c] == x[c] ? x[c] : 0.f;
    r = r > low ? r : low;
    r = r < high ? r : high;
    codes[c] = static_cast<uint8_t>(std::bit_cast<uint32_t>(r + kRoundingMagic));
  }
}

}  // namespace octet
