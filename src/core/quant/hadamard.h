// The random-sign Hadamard rotation of one row. The quantizers, the prologues of the attention kernels and the GPU
// apply the same operations in the same order, so that all produce the same bits.
//
// Every function is `static`: kernels are compiled once per instruction set, and a shared inline function would
// leave the linker free to keep the AVX-512 copy for everybody.
#pragma once
#include <cmath>
#include <cstdint>

namespace octet {

// Seed of the random signs that attention uses when it rotates q and k itself.
constexpr uint64_t kHadamardSeed = 0x6f63746574;  // "octet"

// Size of the Hadamard blocks along a row: the largest power of two that divides dim.
static constexpr int64_t hadamard_block(int64_t dim) { return dim & -dim; }

// Sign of channel c: bit 63 of splitmix64(seed + c), as +1 or -1.
static constexpr float hadamard_sign(uint64_t seed, int64_t c) {
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

static inline float hadamard_norm(int64_t dim) { return 1.f / std::sqrt(static_cast<float>(hadamard_block(dim))); }

// x <- H D x / sqrt(block), block-diagonal, with D = diag(signs): orthogonal, so q.k is unchanged when both are
// rotated (incoherent processing, FlashAttention-3, arXiv 2407.08608, section 3.3).
static inline void hadamard(float* x, const float* signs, int64_t dim) {
  for (int64_t c = 0; c < dim; ++c) x[c] *= signs[c];
  hadamard_butterflies(x, dim);
  const float norm = hadamard_norm(dim);
  for (int64_t c = 0; c < dim; ++c) x[c] *= norm;
}

// x <- D H^T x / sqrt(block): the inverse.
static inline void hadamard_inverse(float* x, const float* signs, int64_t dim) {
  hadamard_butterflies(x, dim);
  const float norm = hadamard_norm(dim);
  for (int64_t c = 0; c < dim; ++c) x[c] *= norm * signs[c];
}

}  // namespace octet
