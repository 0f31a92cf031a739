// The mask of the backward pass: which pairs of a block of keys and a tile of queries see each other.
#pragma once
#include "cuda/bwd/schedule.h"
#include "cuda/fragment/accumulator.h"

namespace octet::cuda::sm90 {

// The iterations of a block in which all queries of the tile see all of `keys` keys from `key` on, given by the number
// of iterations left. This works because with a positional mask the tiles are visited from the first on, and without
// one all tiles see the same keys.
struct UnmaskedIterations {
  int most, least;
  UnmaskedIterations() = default;
  __device__ UnmaskedIterations(const BackwardParams& a, const KeyBlockInfo& w, int key, int keys, int queries,
                                int group)
      : most(w.tiles.count() * group), least(0) {
    if (a.mask.windowed) {
      const Interval all = a.mask.queries_of_all(key, key + keys, w.q.tokens, w.k.tokens).all;
      const int first = (all.first + queries - 1) / queries, last = all.last / queries;
      most = (w.tiles.last - max(first, w.tiles.first)) * group,
      least = (w.tiles.last - min(last, w.tiles.last)) * group;
    }
    if (key + keys > w.k.tokens) least = most;
  }
  __device__ bool has(int left) const { return least < left && left <= most; }
};

// Sets p to 0 where a query does not see a key. Rows are keys from `key` on, columns are queries from `query` on.
template <int Columns>
__device__ void mask_P(const BackwardParams& a, Accumulator<Columns>& p, const KeyBlockInfo& w, int key, int query) {
  const int shift = a.mask.shift(w.q.tokens, w.k.tokens);
  const int left = a.mask.windowed ? a.mask.left : Mask::kUnbounded;
  const int right = a.mask.windowed ? a.mask.right : Mask::kUnbounded;
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    const int j = key + fragment_row() + 8 * row;
    const int distance = j - shift - query - fragment_column() + left;  // at the fragment's column 0
#pragma unroll
    for (int i = 0; i < Columns / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (j >= w.k.tokens || static_cast<unsigned>(distance - 8 * i - c) > static_cast<unsigned>(left + right))
          p.x[4 * i + 2 * row + c] = 0.f;
  }
}

}  // namespace octet::cuda::sm90
