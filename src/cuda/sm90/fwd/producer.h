// The producer of the 16-bit forward pass: one thread takes tiles of queries and loads q, k and v by TMA.
#pragma once
#include "cuda/sm90/fwd/forward.h"

namespace octet::cuda::sm90 {

// Runs on one thread.
template <class Precision, class Dims>
__device__ inline void Forward<Precision, Dims>::produce() {
  PipelineState<Tile::kQStages> q_state;
  PipelineState<Tile::kStages> k_state, v_state;
  unsigned number = blockIdx.x;
  TileInfo next = a.scheduler.at(number);
  while (true) {
    shared.q_pipe.empty[q_state.stage].wait(q_state.phase ^ 1);
    Block& block = shared.block[q_state.stage];
    Barrier& ready = shared.q_pipe.full[q_state.stage];
    block.q_tile = next;
    if (!next.valid()) {
      ready.arrive();
      return;
    }
    if constexpr (kAlibi) block.slope = slope_log2(a.slopes.at(next.sequence, next.head));
    const TileInfo& q_tile = block.q_tile;
    const int kv_head = q_tile.head / a.group;
    const int k_first = first_key_of(q_tile);
    const int k_row = q_tile.batch * (a.scheduler.heads / a.group) + kv_head;
    const auto fetch = [&](auto tile, const CUtensorMap& map, const int(&broadcast)[2], int row, int head,
                           Barrier& full) {
      load(tile, map, row, head * broadcast[0], q_tile.batch * broadcast[1], &full.word);
    };
    // Load q. The producer arrives later, once it has computed the range of keys.
    ready.expect(TileQ::kBytes);
    fetch(q(q_state.stage), a.q, a.q_broadcast, q_tile.q_first + q_tile.q_start, q_tile.head, ready);
    q_state.advance();
    const auto fetch_k = [&](int tile) {
      shared.k_pipe.empty[k_state.stage].wait(k_state.phase ^ 1);
      Barrier& full = shared.k_pipe.full[k_state.stage];
      auto& scales = shared.k_scale[k_state.stage];
      full.arrive_expecting(TileK::kBytes + (kQuantizedQk ? sizeof scales : 0));
      fetch(k(k_state.stage), a.k, a.k_broadcast, k_first + tile * kKeys, kv_head, full);
      if constexpr (kQuantizedQk)
        ::cuda::ptx::cp_async_bulk(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, &scales,
                                   a.k_scale + static_cast<int64_t>(k_row) * a.keys + k_first + tile * kKeys,
                                   sizeof scales, &full.word);
      k_state.advance();
    };
    const auto fetch_v = [&](int tile) {
      shared.v_pipe.empty[v_state.stage].wait(v_state.phase ^ 1);
      Barrier& full = shared.v_pipe.full[v_state.stage];
      full.arrive_expecting(TileV::kBytes);
      fetch(v(v_state.stage), a.v, a.v_broadcast, q_tile.k_first + tile * kKeys, kv_head, full);
      v_state.advance();
    };
    // Load k and v in the order of their use: k of a tile comes before v of the tile that was issued before it.
    const SeenTiles tiles = block.tiles = seen_tiles(a.mask, q_tile, q_tile.q_start, kRows, kKeys);
    if (tiles.any()) fetch_k(tiles.last - 1);
    for (int i = 0; kSkips && i < Tile::kWarpgroups; ++i)
      block.warpgroup_tiles[i] = seen_tiles(a.mask, q_tile, q_tile.q_start + i * kWarpgroupRows, kWarpgroupRows, kKeys);
    ready.arrive();
    if (tiles.any()) fetch_mask(block, tiles.last - 1, k_state.stage ^ 1);
    if (kConvertsV && tiles.any()) Converter{a.v_slices}.await(k_row);
    for (int tile = tiles.last - 2; tile >= tiles.first; --tile) {
      fetch_k(tile), fetch_v(tile + 1);
      fetch_mask(block, tile, k_state.stage ^ 1);
    }
    // Take the next tile of queries before the wait for a stage for the last v.
    number = a.scheduler.after(number);
    next = a.scheduler.at(number);
    if (tiles.any()) fetch_v(tiles.first);
  }
}

// Loads the mask tensor of a tile of keys for each warpgroup that sees some of it. `turn`: the stage of its k, which is
// the parity of the number of tiles before it, as k has two stages and the mask one.
template <class Precision, class Dims>
__device__ inline void Forward<Precision, Dims>::fetch_mask(const Block& block, int tile, int turn) const {
  if constexpr (kMasked) {
    static_assert(Tile::kStages == 2);
    const TileInfo& q_tile = block.q_tile;
#pragma unroll 1
    for (int i = 0; i < Tile::kWarpgroups; ++i) {
      shared.mask_pipe.empty[i].wait(turn ^ 1);
      Barrier& full = shared.mask_pipe.full[i];
      const SeenTiles& own = kSkips ? block.warpgroup_tiles[i] : block.tiles;
      if (tile < own.first || tile >= own.last) {
        full.arrive();
        continue;
      }
      full.arrive_expecting(TileMask::kBytes);
      load(TileMask{shared.mask[i]}, a.mask_tiles, tile * kKeys,
           (q_tile.q_start + i * kWarpgroupRows) * a.mask_broadcast[0], q_tile.head * a.mask_broadcast[1],
           q_tile.batch * a.mask_broadcast[2], &full.word);
    }
  }
}

// Converts slices of v until none is left. Runs on the warps of the producer that are idle otherwise.
template <class Precision, class Dims>
__device__ inline void Forward<Precision, Dims>::convert_v() const {
  constexpr int kChannels = Tile::kWarpgroups > 2 || kMasked ? 4 : 8;
  constexpr int kAtOnce = kChannels == 4 ? 4 : 3;  // as many words as registers allow
  if (!a.v_slices.heads) return;
  const Converter converter{a.v_slices};
  for (unsigned slice = converter.claim(); converter.exists(slice);) {
    const unsigned next = converter.claim();
    converter.template convert<kChannels, kAtOnce>(slice);
    slice = next;
  }
}

// Converts one slice. Runs on the warps of the consumers ahead of their first tile, as all thread blocks together need
// several heads at once then.
template <class Precision, class Dims>
__device__ inline void Forward<Precision, Dims>::convert_first_v() const {
  constexpr int kAtOnce = 8;
  const Converter converter{a.v_slices};
  const unsigned slice = converter.claim();
  if (converter.exists(slice)) converter.template convert<kVec8, kAtOnce>(slice);
}

}  // namespace octet::cuda::sm90
