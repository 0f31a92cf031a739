// The logits of online softmax (fragment/softmax.h) with ALiBi: in base 2 and without the row bias.
#pragma once
#include "cuda/fragment/alibi.h"
#include "cuda/fragment/softmax.h"

namespace octet::cuda {

// The terms of a tile of keys, for the two rows of a thread. `ranges`: the keys that they see.
struct AlibiTile {
  float product_log2;  // brings q.k to base 2
  float slope;         // in base 2
  int diagonal;        // the first row's key at distance 0
  int key;             // that of the thread's first column

  // Turns products of q and k into logits.
  template <int Columns>
  __device__ void add(Accumulator<Columns>& s, const Interval (&ranges)[kRowsPerThread]) const {
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float distance = static_cast<float>(diagonal + 8 * row - key);
      const float nearest = static_cast<float>(nearest_of(row, ranges));
#pragma unroll
      for (int i = 0; i < Columns / 8; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s.x[4 * i + 2 * row + c];
          const float term = slope * (fabsf(distance - static_cast<float>(8 * i + c)) - nearest);
          x = __fmaf_rn(x, product_log2, -term);
        }
    }
  }

  // OnlineSoftmax::exp_stale_max of the logits of products of q and k. Where all keys lie on one side of the diagonal,
  // and the slope is gentle, terms are linear in the key: one fma for each. Else `is_linear` becomes false.
  template <int Exponent, int Columns>
  __device__ RowValues exp_stale_max(Accumulator<Columns>& s, const Interval (&ranges)[kRowsPerThread],
                                     const OnlineSoftmax& softmax, bool& is_linear) const {
    const int apart = diagonal - key;
    const bool before = apart > Columns - 8, after = apart <= -8 * (kRowsPerThread - 1);
    is_linear = is_gentle(slope) && (before || after);
    const float step = before ? slope : -slope;  // from key to key
    RowValues sum;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int distance = (before ? apart + 8 * row : -apart - 8 * row) - nearest_of(row, ranges);
      const float first =
          -slope * static_cast<float>(distance) - softmax.template origin<Exponent>(row, softmax.m[row]);
      float sums[2] = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < Columns / 8; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s.x[4 * i + 2 * row + c];
          x = ptx::exp2(__fmaf_rn(x, product_log2, __fmaf_rn(step, static_cast<float>(8 * i + c), first)));
          sums[c] += x;
        }
      sum[row] = sums[0] + sums[1];
    }
    return sum;
  }

 private:
  __device__ int nearest_of(int row, const Interval (&ranges)[kRowsPerThread]) const {
    return AlibiRow::of(slope, diagonal + 8 * row, ranges[row]).nearest;
  }
};

}  // namespace octet::cuda
