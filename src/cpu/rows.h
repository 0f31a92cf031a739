// Arithmetic on one row of a tensor, shared by the quantisers and by the prologues of the attention kernels, so
// that both produce the same bits: fixed order of operations, no fused multiply-adds to contract.
#pragma once
#include <cmath>
#include <cstdint>

namespace octet {

// Seed of the random signs that attention uses when it rotates q and k itself.
constexpr uint64_t kHadamardSeed = 0x6f63746574;  // "octet"

// Size of the Hadamard blocks along a row: the largest power of two that divides dim.
static constexpr int64_t hadamard_block(int64_t dim) { return dim & -dim; }

// Sign of channel c: bit 63 of splitmix64(seed + c), as +1 or -1.
static inline float hadamard_sign(uint64_t seed, int64_t c) {
  uint64_t z = seed + 0x9e3779b97f4a7c15u * (static_cast<uint64_t>(c) + 1);
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return (z ^ z >> 31) >> 63 ? -1.f : 1.f;
}

// x <- H D x / sqrt(block), block-diagonal, with D = diag(signs): orthogonal, so q.k is unchanged when both are
// rotated (incoherent processing, FlashAttention-3, arXiv 2407.08608, section 3.3).
static inline void hadamard(float* x, const float* signs, int64_t dim) {
  const int64_t block = hadamard_block(dim);
  for (int64_t c = 0; c < dim; ++c) x[c] *= signs[c];
  for (int64_t half = 1; half < block; half *= 2)
    for (int64_t start = 0; start < dim; start += 2 * half)
      for (int64_t c = start; c < start + half; ++c) {
        const float a = x[c], b = x[c + half];
        x[c] = a + b;
        x[c + half] = a - b;
      }
  const float norm = 1.f / std::sqrt(static_cast<float>(block));
  for (int64_t c = 0; c < dim; ++c) x[c] *= norm;
}

// x <- D H^T x / sqrt(block): the inverse.
static inline void hadamard_inverse(float* x, const float* signs, int64_t dim) {
  const int64_t block = hadamard_block(dim);
  for (int64_t half = 1; half < block; half *= 2)
    for (int64_t start = 0; start < dim; start += 2 * half)
      for (int64_t c = start; c < start + half; ++c) {
        const float a = x[c], b = x[c + half];
        x[c] = a + b;
        x[c + half] = a - b;
      }
  const float norm = 1.f / std::sqrt(static_cast<float>(block));
  for (int64_t c = 0; c < dim; ++c) x[c] *= norm * signs[c];
}

static inline float amax(const float* x, int64_t n) {
  float m = 0.f;
  for (int64_t c = 0; c < n; ++c) m = std::fmax(m, std::fabs(x[c]));
  return m;
}

// A symmetric scale and its inverse for codes up to `top`: x ~ step * code. All-zero groups get 0 and 0; the inverse is
// finite, so that 0 keeps code 0 in groups of denormal numbers.
struct Step {
  float step, inverse;
};
static inline Step step_of(float amax, float top) {
  return amax > 0.f ? Step{amax / top, std::fmin(top / amax, 0x1.fffffep127f)} : Step{0.f, 0.f};
}

}  // namespace octet
