// ALiBi (fragment/alibi.h) in the backward pass: p of a fragment whose rows are keys and whose columns are queries.
#pragma once
#include "cuda/bwd/schedule.h"
#include "cuda/fragment/alibi.h"
#include "cuda/sm90/bwd/tiles.h"

namespace octet::cuda::sm90 {

// Returns the slope, in base 2, of head `head` of the group of a block of keys.
__device__ inline float slope_of(const AlibiSlopes& slopes, const BackwardParams& a, const KeyBlockInfo& w, int head) {
  const int sequence = a.k_blocks.cu_seqlens ? w.k.index : w.batch;
  return slope_log2(slopes.at(sequence, w.kv_head * (a.heads / a.kv_heads) + head));
}

// Returns true if the slopes of a block of keys are gentle, and all queries from `first` on see their key at distance
// 0, so that they have no row bias.
__device__ inline bool has_gentle_terms(const AlibiSlopes& slopes, const BackwardParams& a, const KeyBlockInfo& w,
                                        int first) {
  const int apart = w.k.tokens - w.q.tokens, from_mask = apart - a.mask.shift(w.q.tokens, w.k.tokens);
  if (first + apart < 0 || (a.mask.windowed && (from_mask < -a.mask.left || from_mask > a.mask.right))) return false;
  for (int head = 0; head < a.heads / a.kv_heads; ++head)
    if (!is_gentle(slope_of(slopes, a, w, head))) return false;
  return true;
}

// Turns s into p = exp(scale s - term - lse). Rows are keys from `key` on, columns are queries from `query` on; lse, in
// base 2, lacks the row bias. kGentle: see has_gentle_terms.
template <bool kGentle, int Columns>
__device__ void take_alibi_P(const BackwardParams& a, Accumulator<Columns>& s, float factor, float slope,
                             const float* lse, const KeyBlockInfo& w, int key, int query) {
  const int apart = w.k.tokens - w.q.tokens, column = query + fragment_column();
  const float distance = static_cast<float>(column + apart - key - fragment_row());  // at the first row and column
  const float at_first = slope * distance;
#pragma unroll
  for (int i = 0; i < Columns / 8; ++i) {
    const float2 lse_of_both = *reinterpret_cast<const float2*>(lse + 8 * i + fragment_column());
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float lse_of_column = c ? lse_of_both.y : lse_of_both.x;
      const int of_column = column + 8 * i + c;
      float nearest = 0.f;
      if (!kGentle)
        nearest = static_cast<float>(
            AlibiRow::of(slope, of_column + apart, a.mask.keys_of(of_column, w.q.tokens, w.k.tokens)).nearest);
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) {
        float& x = s.x[4 * i + 2 * row + c];
        const float further = static_cast<float>(8 * i + c - 8 * row);
        const float term =
            kGentle ? fabsf(__fmaf_rn(slope, further, at_first)) : slope * (fabsf(distance + further) - nearest);
        x = ptx::exp2(__fmaf_rn(x, factor, -term - lse_of_column));
      }
    }
  }
}

}  // namespace octet::cuda::sm90
