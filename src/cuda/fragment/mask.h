// Positional masks: the keys that a query sees are an interval, as in Problem::keys_of.
#pragma once
#include "cuda/fragment/accumulator.h"
#include "cuda/fragment/positional_mask.h"

namespace octet::cuda {

__device__ inline Interval Mask::keys_of(int i, int n, int m) const {
  if (!windowed) return {0, m};
  const int diagonal = i + shift(n, m);
  const int first = min(max(diagonal - left, 0), m), last = min(max(diagonal + right + 1, 0), m);
  return {first, max(first, last)};
}

__device__ inline Interval Mask::queries_of(int j, int n, int m) const {
  if (!windowed) return {0, n};
  const int diagonal = j - shift(n, m);
  return {diagonal - right, diagonal + left + 1};
}

// Both ends of these intervals grow with the query, and with the key.
__device__ inline SeenIntervals Mask::keys_of_all(int first, int end, int n, int m) const {
  const Interval top = keys_of(first, n, m), bottom = keys_of(end - 1, n, m);
  return {{top.first, bottom.last}, {bottom.first, top.last}};
}

__device__ inline SeenIntervals Mask::queries_of_all(int first, int end, const int& n, const int& m) const {
  const int start = shift(n, m), top = first - start, bottom = end - 1 - start;
  return {{max(top - right, 0), min(bottom + left + 1, n)}, {max(bottom - right, 0), top + left + 1}};
}

__device__ inline Interval Mask::seen(int n, int m) const {
  if (n == 0) return {0, 0};
  const int first = keys_of(0, n, m).first;
  return {first, max(keys_of(n - 1, n, m).last, first)};
}

__device__ inline Interval Mask::seeing(int n, int m) const {
  if (m == 0) return {0, 0};
  if (!windowed) return {0, n};
  const int first = min(max(-shift(n, m) - right, 0), n);
  return {first, max(first, min(m + left - shift(n, m), n))};
}

// Tells whether a key is seen, for tokens that mostly belong to the same sequence as the last one.
class SeenTokens {
 public:
  __device__ explicit SeenTokens(const SeenKeys& keys)
      : keys_(keys), begin_(0), end_(keys.cu_seqlens_k ? 0 : 1 << 30), seen_{keys.first, keys.last} {}
  __device__ bool operator()(int token) {
    if (keys_.all) return true;
    if (token < begin_ || token >= end_) find(token);
    return seen_.first <= token && token < seen_.last;
  }

 private:
  __device__ void find(int token) {
    int low = 0, high = keys_.sequences;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (keys_.cu_seqlens_k[middle] <= token ? low : high) = middle;
    }
    begin_ = keys_.cu_seqlens_k[low], end_ = keys_.cu_seqlens_k[low + 1];
    const Interval seen = keys_.mask.seen(keys_.cu_seqlens_q[low + 1] - keys_.cu_seqlens_q[low], end_ - begin_);
    seen_ = {begin_ + seen.first, begin_ + seen.last};
  }

  const SeenKeys& keys_;
  int begin_, end_;  // of the sequence that `seen_` belongs to
  Interval seen_;
};

// Sets elements whose keys lie outside of the ranges of this thread's two rows to `masked`: -inf for logits, 0 for P.
// `key`: the key of column 0 of the fragment.
template <int Columns>
__device__ void mask_rows(Accumulator<Columns>& s, int key, const Interval (&ranges)[kRowsPerThread],
                          float masked = -INFINITY) {
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    const int last = ranges[row].last - key - fragment_column(), first = ranges[row].first - key - fragment_column();
#pragma unroll
    for (int i = 0; i < Columns / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (8 * i + c >= last) s.x[4 * i + 2 * row + c] = masked;
    // Under a causal mask every range starts before the tile; only windows go on.
    if (first <= 0) continue;
#pragma unroll
    for (int i = 0; i < Columns / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (8 * i + c < first) s.x[4 * i + 2 * row + c] = masked;
  }
}

}  // namespace octet::cuda
