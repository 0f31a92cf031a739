// Positional masks: the keys that a query sees are an interval, as Problem::keys_of has it.
#pragma once
#include "cuda/tile/fragment.h"

namespace octet::cuda {

struct KeyRange {
  int first, last;  // [first, last)
};

// Which keys query i of n sees among m.
struct Mask {
  bool windowed, bottom_right;
  int left, right;  // keys seen left and right of the diagonal; at most kUnbounded

  static constexpr int kUnbounded = 1 << 29;  // sums with token counts stay in an int

  __device__ KeyRange keys_of(int i, int n, int m) const {
    if (!windowed) return {0, m};
    const int diagonal = i + (bottom_right ? m - n : 0);
    const int first = min(max(diagonal - left, 0), m), last = min(max(diagonal + right + 1, 0), m);
    return {first, max(first, last)};
  }
};

// What stands for keys out of the ranges of this thread's two rows becomes `masked`: logits -inf, weights 0. `key`: the
// key of the fragment's column 0.
template <int Columns>
__device__ void mask_rows(Accumulator<Columns>& s, int key, const KeyRange (&ranges)[kRowsPerThread],
                          float masked = -INFINITY) {
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    const int last = ranges[row].last - key - fragment_column(), first = ranges[row].first - key - fragment_column();
#pragma unroll
    for (int i = 0; i < Columns / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (8 * i + c >= last) s.x[4 * i + 2 * row + c] = masked;
    // Under a causal mask the first key is one before all tiles: this is for windows.
    if (first <= 0) continue;
#pragma unroll
    for (int i = 0; i < Columns / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (8 * i + c < first) s.x[4 * i + 2 * row + c] = masked;
  }
}

}  // namespace octet::cuda
