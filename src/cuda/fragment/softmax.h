// Online softmax over tiles of logits (FlashAttention-2, arXiv 2307.08691, algorithm 1), for the two rows of a thread:
//   m' = max(m, max_j s_j)    p_j = exp(scale (s_j - m'))    l' = l exp(scale (m - m')) + sum_j p_j
//
// Any m gives the same result as long as no p leaves its format. `exp_stale_max` therefore keeps the m of earlier
// tiles, so that it needs nothing from a tile before its exponentials; where the result does not fit, `exp_update_max`
// repeats the tile with a new m. The number that is subtracted, `origin`, is rounded once and used wherever m appears
// above: keys that tie get equal p, and l and lse refer to the same origin as p.
#pragma once
#include "cuda/fragment/rows.h"
#include "cuda/ptx/types.h"

namespace octet::cuda {

struct OnlineSoftmax {
  RowValues scale_log2;  // exp(scale x) = 2^(scale_log2 x)
  RowValues m{-INFINITY, -INFINITY};
  RowValues l{0.f, 0.f};  // sum over this thread's columns, times 2^Exponent

  // The number that is subtracted: 2^Exponent p = 2^(scale_log2 s - origin).
  template <int Exponent>
  __device__ float origin(int row, float m) const {
    return origin<Exponent>(scale_log2[row], m);
  }
  template <int Exponent>
  __device__ static float origin(float scale_log2, float m) {
    return __fmaf_rn(m, scale_log2, -float(Exponent));
  }

  // Turns logits into 2^Exponent p over the new maximum; returns the factors by which sums over the former maximum must
  // be multiplied.
  template <int Exponent, int Columns>
  __device__ RowValues exp_update_max(Accumulator<Columns>& s) {
    RowValues rescale;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float most = quad_max(row_max(s, row, m[row]));
      const float to = origin<Exponent>(row, most == -INFINITY ? 0.f : most);  // -inf: the row has seen no key yet
      rescale[row] = ptx::exp2(origin<Exponent>(row, m[row]) - to);
      m[row] = most;
      l[row] = l[row] * rescale[row] + exponentials(s, row, to);
    }
    return rescale;
  }

  // Takes the maximum of a tile as that of the rows that have seen no key so far. As they have no sums either, nothing
  // must be rescaled.
  template <int Columns>
  __device__ void start_max(const Accumulator<Columns>& s) {
    if (!__any_sync(~0u, fminf(m[0], m[1]) == -INFINITY)) return;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float most = quad_max(row_max(s, row, -INFINITY));
      if (m[row] == -INFINITY) m[row] = most;
    }
  }

  // Turns logits into 2^Exponent p over the maximum of earlier tiles. Returns the part of l that belongs to this tile,
  // which is not added yet; it is inf or NaN where a row has seen no key so far.
  template <int Exponent, int Columns>
  __device__ RowValues exp_stale_max(Accumulator<Columns>& s) const {
    RowValues sum;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) sum[row] = exponentials(s, row, origin<Exponent>(row, m[row]));
    return sum;
  }

  // The same in steps. Returns true if 2^Exponent p over the maximum of earlier tiles is at most 2^most_log2 for logits
  // up to `most` of this thread; false where a row has seen no key so far.
  template <int Exponent>
  __device__ bool fits_stale_max(const RowValues& most, float most_log2) const {
    bool fits = true;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row)
      fits &= __fmaf_rn(most[row], scale_log2[row], -origin<Exponent>(row, m[row])) <= most_log2;
    return fits;
  }
  // Raises the maximum to that of the tile; returns the factors by which sums over the former one must be multiplied.
  template <int Exponent>
  __device__ RowValues update_max(const RowValues& most) {
    RowValues rescale;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float raised = fmaxf(quad_max(most[row]), m[row]);
      // A row that has still seen no key has nothing to rescale.
      rescale[row] =
          raised == -INFINITY ? 1.f : ptx::exp2(origin<Exponent>(row, m[row]) - origin<Exponent>(row, raised));
      m[row] = raised;
      l[row] *= rescale[row];
    }
    return rescale;
  }
  // Turns logits into 2^Exponent p, and adds these to l.
  template <int Exponent, int Columns>
  __device__ void exp_and_sum(Accumulator<Columns>& s) {
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row)
      l[row] += exponentials(s, row, origin<Exponent>(row, m[row] == -INFINITY ? 0.f : m[row]));
  }

 private:
  // Replaces s by its exponentials and returns their sum.
  template <int Columns>
  __device__ float exponentials(Accumulator<Columns>& s, int row, float from) const {
    float sum[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < Columns / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s.x[4 * i + 2 * row + c];
        x = ptx::exp2(__fmaf_rn(x, scale_log2[row], -from));
        sum[c] += x;
      }
    return sum[0] + sum[1];
  }
};

// Bias correction beta (arXiv 2510.04212, algorithm 1). Where keys tie for the largest logit r of a row, the maximum
// moves away from r, so that their P are not exactly 1 and are rounded like all others: to beta r if r > 0, to 0 if r <
// 0, by at most `limit`. A tie may span tiles.
struct ShiftedSoftmax : OnlineSoftmax {
  float beta, limit;
  RowValues top{-INFINITY, -INFINITY};  // the largest logit so far; m may lie above it

  template <int Exponent, int Columns>
  __device__ RowValues exp_update_max(Accumulator<Columns>& s) {
    RowValues rescale;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float highest = quad_max(row_max(s, row, -INFINITY)), largest = fmaxf(highest, top[row]);
      float ties = 0.f;
#pragma unroll
      for (int i = 0; i < Columns / 8; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) ties += s.x[4 * i + 2 * row + c] == largest ? 1.f : 0.f;
      ties = quad_sum(ties);
      const bool tied = ties >= 2.f || (ties == 1.f && top[row] == largest);
      const bool shifts = tied && highest != 0.f && highest != -INFINITY;
      const float shifted = fminf(highest > 0.f ? beta * highest : 0.f, highest + limit);
      const float most = fmaxf(m[row], shifts ? shifted : highest);
      rescale[row] = most == m[row] ? 1.f : ptx::exp2(origin<Exponent>(row, m[row]) - origin<Exponent>(row, most));
      l[row] *= rescale[row];
      m[row] = most;
      top[row] = largest;
    }
    OnlineSoftmax::exp_update_max<Exponent>(s);  // m is final now: no logit of the tile lies above it
    return rescale;
  }
};

}  // namespace octet::cuda
