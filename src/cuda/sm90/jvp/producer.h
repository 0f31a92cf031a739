// The producer of the jvp pass: one thread takes tiles of queries and loads operands and tangents by TMA.
#pragma once
#include "cuda/sm90/jvp/jvp.h"

namespace octet::cuda::sm90 {

// Runs on one thread.
template <class T, class Dims>
__device__ void Jvp<T, Dims>::produce() {
  PipelineState<1> q_state;
  PipelineState<Tile::kStages> k_state, v_state;
  unsigned number = blockIdx.x;
  TileInfo next = a.scheduler.at(number);
  while (true) {
    shared.q_pipe.empty[0].wait(q_state.phase ^ 1);
    Block& block = shared.block[q_state.phase];
    Barrier& ready = shared.q_pipe.full[0];
    block.q_tile = next;
    if (!next.valid()) {
      ready.arrive();
      return;
    }
    const TileInfo& q_tile = block.q_tile;
    const int kv_head = q_tile.head / a.group;
    const auto fetch = [&](auto tile, const JvpInput& x, int row, int head, Barrier& full) {
      load(tile, x.map, row, head * x.broadcast[0], q_tile.batch * x.broadcast[1], &full.word);
    };
    // Load q and tq. The producer arrives later, once it has computed the range of keys.
    ready.expect(2 * TileQ::kBytes);
    fetch(q(), a.q, q_tile.q_first + q_tile.q_start, q_tile.head, ready);
    fetch(tq(), a.tq, q_tile.q_first + q_tile.q_start, q_tile.head, ready);
    q_state.advance();
    const auto fetch_k = [&](int tile) {
      shared.k_pipe.empty[k_state.stage].wait(k_state.phase ^ 1);
      Barrier& full = shared.k_pipe.full[k_state.stage];
      full.arrive_expecting(TilesK::kBytes);
      fetch(k(k_state.stage), a.k, q_tile.k_first + tile * kKeys, kv_head, full);
      fetch(tk(k_state.stage), a.tk, q_tile.k_first + tile * kKeys, kv_head, full);
      k_state.advance();
    };
    const auto fetch_v = [&](int tile) {
      shared.v_pipe.empty[v_state.stage].wait(v_state.phase ^ 1);
      Barrier& full = shared.v_pipe.full[v_state.stage];
      full.arrive_expecting(TilesV::kBytes);
      fetch(v(v_state.stage), a.v, q_tile.k_first + tile * kKeys, kv_head, full);
      fetch(tv(v_state.stage), a.tv, q_tile.k_first + tile * kKeys, kv_head, full);
      v_state.advance();
    };
    // Load in the order of their use: k of a tile comes right after v of the tile before it.
    const SeenTiles tiles = block.tiles = seen_tiles(a.mask, q_tile, q_tile.q_start, kRows, kKeys);
    if (tiles.any()) fetch_k(tiles.last - 1);
    for (int i = 0; i < Tile::kWarpgroups; ++i)
      block.warpgroup_tiles[i] =
          kSkips ? seen_tiles(a.mask, q_tile, q_tile.q_start + i * kWarpgroupRows, kWarpgroupRows, kKeys) : tiles;
    ready.arrive();
    for (int tile = tiles.last - 2; tile >= tiles.first; --tile) fetch_v(tile + 1), fetch_k(tile);
    // Take the next tile of queries before the wait for a stage for the last v.
    number = a.scheduler.after(number);
    next = a.scheduler.at(number);
    if (tiles.any()) fetch_v(tiles.first);
  }
}

}  // namespace octet::cuda::sm90
