// The tiles of keys that a tile of queries sees.
#pragma once
#include "cuda/fragment/mask.h"
#include "cuda/scheduler/tile_scheduler.h"
#include "cuda/sm90/smem.h"

namespace octet::cuda::sm90 {

struct SeenTiles {
  int first, last;  // tiles [first, last) that any of the queries sees
  int end;          // the end of the keys that any of them sees
  Interval all;     // the keys that all of them see

  __device__ bool any() const { return first < last; }
};

// Returns whether some query does not see all of the Keys keys of a tile. As a member of SeenTiles it would have ptxas
// order the forward kernels otherwise.
template <int Keys>
__device__ bool needs_mask(const SeenTiles& tiles, int tile) {
  return tile * Keys < tiles.all.first || (tile + 1) * Keys > tiles.all.last;
}

// Returns the tiles of `keys` keys that `rows` queries from `query` on see.
__device__ inline SeenTiles seen_tiles(const Mask& mask, const TileInfo& q_tile, int query, int rows, int keys) {
  const int end = min(query + rows, q_tile.q_tokens);
  const SeenIntervals seen = mask.keys_of_all(query, end, q_tile.q_tokens, q_tile.k_tokens);
  if (end <= query || seen.any.last <= seen.any.first) return {0, 0, 0, {0, 0}};
  const Interval tiles = seen.any.tiles(keys);
  return {tiles.first, tiles.last, seen.any.last, seen.all};
}

// Sets rows [from, to) of a tile to 0, by one warpgroup: rows that no query sees, or of the next packed sequence, may
// hold inf or NaN, and 0 times these would be NaN.
template <class Tile>
__device__ void clear_rows(const Tile& tile, int from, int to) {
  constexpr int kWords = kPanelRowBytes / 16;
  for (int i = from * kWords + threadIdx.x % kWarpgroup; i < to * kWords; i += kWarpgroup)
    for (int panel = 0; panel < Tile::kPanels; ++panel)
      reinterpret_cast<uint4*>(tile.data + panel * Tile::kPanelBytes)[i] = {0, 0, 0, 0};
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
}

}  // namespace octet::cuda::sm90
