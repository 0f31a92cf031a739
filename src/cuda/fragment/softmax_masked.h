// The logits of online softmax (fragment/softmax.h) with a mask tensor: in base 2 and without the row bias of their
// row, which is the largest number that the mask adds to a logit of it.
#pragma once
#include "cuda/fragment/finish.h"
#include "cuda/fragment/masked.h"
#include "cuda/fragment/softmax.h"
#include "cuda/ptx/mma_sync.h"

namespace octet::cuda {

// The numbers of a tile of keys in shared memory, for the two rows of a thread. Rows are as TMA writes them, in panels
// of `PanelBytes`.
template <class T, int PanelBytes>
struct MaskTile {
  uint32_t address;    // of this thread's row for ldmatrix (sm90/mma.h, store_offset)
  float product_log2;  // brings q.k to base 2
  RowValues row_bias;  // infinite for rows beyond the queries, which hides all keys from them

  // Calls f(x, number, row) for each element of s. __syncwarp() keeps ptxas from loading all numbers at once, for want
  // of registers.
  template <int Columns, class F>
  __device__ void each(Accumulator<Columns>& s, const F& f) const {
#pragma unroll
    for (int i = 0; i < Columns / 16; ++i) {
      uint32_t words[4];
      ptx::ldmatrix(words, (address ^ i % 4 * 32) + i / 4 * PanelBytes);
      __syncwarp();
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const float2 numbers = ptx::unpack<T>(words[word]);
        float* const x = &s.x[8 * i + 2 * word];
        f(x[0], numbers.x, word % 2), f(x[1], numbers.y, word % 2);
      }
    }
  }
  // Turns products of q and k into logits. What the mask hides becomes -inf, whatever the product is.
  template <int Columns>
  __device__ void add(Accumulator<Columns>& s) const {
    each(s, [&](float& x, float number, int row) {
      const float shifted = number - row_bias[row], logit = __fmaf_rn(x, product_log2, shifted * kLog2e);
      x = shifted == -INFINITY ? shifted : logit;
    });
  }
  // OnlineSoftmax::exp_stale_max of the logits of products of q and k. A hidden key adds 0 whatever its product is:
  // were the sum not finite, the tile would be repeated over another maximum, with other bits for the rows of all
  // queries.
  template <int Exponent, int Columns>
  __device__ RowValues exp_stale_max(Accumulator<Columns>& s, const OnlineSoftmax& softmax) const {
    RowValues from, sums[2]{{0.f, 0.f}, {0.f, 0.f}};
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) from[row] = softmax.template origin<Exponent>(row, softmax.m[row]);
    // The lesser of a logit, even of NaN, and of -inf for a hidden key: a comparison takes registers that there are
    // not. Other logits are either far below this bound or have an infinite P, for which the tile is repeated.
    constexpr float kMostLogit = 0x1p120f;
    int column = 0;
    each(s, [&](float& x, float number, int row) {
      const float shifted = number - row_bias[row];
      const float logit = __fmaf_rn(x, product_log2, __fmaf_rn(shifted, kLog2e, -from[row]));
      x = ptx::exp2(fminf(logit, shifted + kMostLogit));
      sums[column++ % 2][row] += x;
    });
    return {sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]};
  }
};

// Returns whether P over the stale maximum, of these sums in a thread, may stay. A row that the mask leaves few keys
// has nothing that would hide the rounding error of a large P: it is at most 1 or half of the row's sum, as two equal
// keys err as much.
template <int Exponent>
__device__ bool fits_beside_sum(const OnlineSoftmax& softmax, const RowValues& sum) {
  constexpr float kOne = static_cast<float>(1 << Exponent);
  bool fits = true;
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row)
    fits &= sum[row] <= fmaxf(kOne, quad_sum(softmax.l[row] + sum[row]) / 2.f);
  return fits;
}

}  // namespace octet::cuda
