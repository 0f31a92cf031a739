// The producer of the 8-bit forward pass: one thread takes tiles of queries and loads q, k, v and scales by TMA.
#pragma once
#include "cuda/sm90/fwd/forward_8bit.h"

namespace octet::cuda::sm90 {

// Writes the rows of ones after the channels of v, which TMA does not overwrite. The first row has a one for every key;
// the others have ones for disjoint parts of the keys, which together are all keys. All chunks of 16 keys are alike, so
// the swizzle has no effect.
template <class Precision, class Dims>
__device__ inline void Forward8Bit<Precision, Dims>::write_ones() const {
  if constexpr (Precision::kSumRounded) {
    constexpr int kRowWords = TileV::kPanelWidth / 4, kRowsWords = kSumRows * kRowWords;
    for (int i = threadIdx.x; i < k8BitStages * TileV::kPanels * kRowsWords; i += kThreads) {
      auto* panel = reinterpret_cast<uint32_t*>(shared.v[0] + i / kRowsWords * TileV::kPanelBytes +
                                                Dims::kDimV * TileV::kPanelWidth);
      const int row = i % kRowsWords / kRowWords, key = i % 4 * 4;
      float ones[4];
      for (int k = 0; k < 4; ++k) ones[k] = row == 0 || (key + k) % (kSumRows - 1) == row - 1 ? 1.f : 0.f;
      panel[i % kRowsWords] = ptx::pack<typename Precision::VType>(ones[0], ones[1], ones[2], ones[3]);
    }
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
  }
}

// Runs on one thread.
template <class Precision, class Dims>
__device__ inline void Forward8Bit<Precision, Dims>::produce() {
  namespace ptx = ::cuda::ptx;
  PipelineState<Tile::kQStages> q_state;
  PipelineState<Tile::kQStages + 1> tile_state;
  PipelineState<k8BitStages> kv_state;
  unsigned number = blockIdx.x;
  while (true) {
    const TileInfo q_tile = a.scheduler.at(number);
    shared.q_pipe.empty[q_state.stage].wait(q_state.phase ^ 1);
    shared.q_tile[tile_state.stage] = q_tile;
    tile_state.advance();
    Barrier& q_full = shared.q_pipe.full[q_state.stage];
    if (!q_tile.valid()) {
      q_full.arrive();
      return;
    }
    const SeenTiles tiles = tiles_of(q_tile, q_tile.q_start, kRows);
    const int kv_head = q_tile.head / a.group;
    const int first_key = first_key_of(q_tile);
    const int64_t first_scale =
        (static_cast<int64_t>(q_tile.batch) * (a.scheduler.heads / a.group) + kv_head) * a.keys + first_key;
    q_full.arrive_expecting(TileQ::kLoadedBytes);
    load(q(q_state.stage), a.q, 0, q_tile.q_first + q_tile.q_start, q_tile.head * a.q_broadcast[0],
         q_tile.batch * a.q_broadcast[1], &q_full.word);
    q_state.advance();
    const auto fetch = [&](bool with_k, bool with_v, int tile) {
      const int stage = kv_state.stage;
      shared.kv_pipe.empty[stage].wait(kv_state.phase ^ 1);
      Barrier& full = shared.kv_pipe.full[stage];
      constexpr int kScaleBytes =
          (kKeyScales == KeyScales::none ? 0 : sizeof shared.k_scale[0]) + (kScaled ? sizeof shared.v_scale[0] : 0);
      full.arrive_expecting((with_k ? TileK::kLoadedBytes + kScaleBytes : 0) + (with_v ? TileV::kLoadedBytes : 0));
      if (with_k) {
        load(k(stage), a.k, 0, (a.k_in_tiles ? first_key : q_tile.k_first) + tile * kKeys, kv_head * a.k_broadcast[0],
             q_tile.batch * a.k_broadcast[1], &full.word);
        const auto fetch_scales = [&](auto& to, const float* from) {
          ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, &to, from, sizeof to, &full.word);
        };
        const int64_t at = first_scale + tile * kKeys;
        if constexpr (kKeyScales == KeyScales::tokens) fetch_scales(shared.k_scale[stage], a.k_scale + at);
        if constexpr (kKeyScales == KeyScales::groups)
          fetch_scales(shared.k_scale[stage], a.k_scale + at / kGroupBlock * kScaleGroups);
        if constexpr (kScaled) fetch_scales(shared.v_scale[stage], a.v_scale + 2 * at);
      }
      if (with_v) load(v(stage), a.v, first_key + (tile + 1) * kKeys, 0, kv_head, q_tile.batch, &full.word);
      kv_state.advance();
    };
    // The products with k of a tile and with v of the tile before are issued together, so both share a stage.
    if (tiles.any())
      for (int tile = tiles.last - 1; tile >= tiles.first - 1; --tile)
        fetch(tile >= tiles.first, tile < tiles.last - 1, tile);
    number = a.scheduler.after(number);
  }
}

}  // namespace octet::cuda::sm90
