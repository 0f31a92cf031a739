// Products of float32 numbers by tensor cores. Each number is the sum of two tf32 numbers and an error below 2^-22 of
// it; of the four products of such parts three are taken, as the last is below 2^-22 of the whole.
#pragma once
#include <cstdint>

#include "cuda/ptx/mma_sync.h"

namespace octet::cuda::sm80 {

// Larger numbers have no parts, nor do inf and NaN: callers compute with these in float32.
constexpr float kMostInTf32 = 0x1.ffp127f;

__device__ inline void split(float x, uint32_t& large, uint32_t& small) {
  large = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;  // rounded to the 11 bits that tf32 has
  small = __float_as_uint(x - __uint_as_float(large));
}

// The sums of a warp: M times 16 rows, N times 8 columns. Of each block thread t has rows t / 4 and t / 4 + 8, columns
// 2 (t mod 4) and the next.
template <int M, int N>
struct Tf32Sums {
  float x[M][N][4] = {};

  // += a b, summed over `Depth`. left(m, row, i) returns numbers i and i + Stride of a row of the m-th 16 rows of a,
  // right(n, column, i) those of a column of the n-th 8 columns of b: with Stride 1 a thread has neighbours, which it
  // reads at once, with Stride 4 neighbours belong to four threads. Tensor cores truncate sums, so those of 32 are
  // taken apart and added in float32, and so are those of small parts.
  template <int Depth, int Stride, class Left, class Right>
  __device__ void add(int lane, const Left& left, const Right& right) {
    static_assert(Stride == 1 || Stride == 4);
    constexpr int kDepth = Depth < 32 ? Depth : 32, kColumns = M == 1 && N > 1 ? 2 : 1;  // at a time
    constexpr int kUnrolled = M == 1 ? 4 : 2;                                            // what registers have room for
    static_assert(Depth % kDepth == 0 && N % kColumns == 0);
    const int outer = lane / 4, inner = lane % 4 * (Stride == 1 ? 2 : 1);
#pragma unroll
    for (int n0 = 0; n0 < N; n0 += kColumns)
#pragma unroll 1
      for (int first = inner; first < Depth + inner; first += kDepth) {
        Tf32Sums<M, kColumns> large, small;
#pragma unroll kUnrolled
        for (int step = 0; step < kDepth; step += 8) {
          uint32_t a_large[M][4], a_small[M][4];
#pragma unroll
          for (int m = 0; m < M; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const float2 numbers = left(m, outer + 8 * j, first + step);
              split(numbers.x, a_large[m][j], a_small[m][j]), split(numbers.y, a_large[m][j + 2], a_small[m][j + 2]);
            }
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
            uint32_t b_large[2], b_small[2];
            const float2 numbers = right(n0 + n, outer, first + step);
            split(numbers.x, b_large[0], b_small[0]), split(numbers.y, b_large[1], b_small[1]);
#pragma unroll
            for (int m = 0; m < M; ++m) {
              ptx::mma_m16n8k8_tf32(small.x[m][n], a_small[m], b_large);
              ptx::mma_m16n8k8_tf32(large.x[m][n], a_large[m], b_large);
              ptx::mma_m16n8k8_tf32(small.x[m][n], a_large[m], b_small);
            }
          }
        }
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
          for (int n = 0; n < kColumns; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) x[m][n0 + n][j] += large.x[m][n][j] + small.x[m][n][j];
      }
  }
};

}  // namespace octet::cuda::sm80
