// RMS norm of rows (arXiv 1910.07467): x -> x / sqrt(mean of x^2 + eps) * weight, in T, float or double. The CPU and
// the GPU compute the same bits: squares are rounded, and their sum has one order. Those of a block of four
// neighbouring channels are added in their order. Then, of a power of two of blocks, of which those beyond the row are
// 0, block i and block i + half of all are added, and so on with half of them.
#pragma once
#include <cstdint>

namespace octet {

constexpr int kNormBlock = 4;  // channels

// The sum of the squares of a block; channel(i): its number i.
template <class T, class Channel>
static constexpr T sum_of_block(const Channel& channel) {
  T sum = channel(0) * channel(0);
  for (int i = 1; i < kNormBlock; ++i) sum += channel(i) * channel(i);
  return sum;
}

// Returns 1 / sqrt(mean of x^2 + eps) of a row of `dim` numbers, from the sum of their squares.
template <class T, class Sqrt>
static constexpr T inverse_rms(T sum, int64_t dim, float eps, const Sqrt& sqrt) {
  return T{1} / sqrt(sum * (T{1} / static_cast<T>(dim)) + static_cast<T>(eps));
}

}  // namespace octet
