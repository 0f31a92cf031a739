// The mainloop of tiles of queries that load and compute two tiles of keys between two barriers, which then share
// addresses, copies and waits. k and v have two stages of a pair each, whose tiles lie one behind the other.
#pragma once
#include "cuda/sm80/fwd/mainloop.h"

namespace octet::cuda::sm80 {

// Loads a pair of tiles of k and v. Rows that no query sees become zeros, as in load_keys().
template <class Kind>
__device__ inline void Forward<Kind>::load_pair(int pair) const {
  const int key = pair * kLoadedKeys;
  const Interval rows{shared.seen.first - key, shared.seen.last - key};
  const bool whole = rows.first <= 0 && rows.last >= kLoadedKeys && a.whole_columns;
  Operands::load_pair_factors(*this, pair);
  const auto load = [&]<class Pair>(const Pair& to, const auto* from, int64_t stride, int columns) {
    using Loader = TileLoader<kThreads, Pair, unsigned>;
    if (whole && stride == Pair::kColumns)
      Loader::load_dense(to, from);
    else
      Loader::load_part(to, Loader::source(from, stride), stride, rows, columns);
  };
  load(pair_of<TileK>(shared.k, pair), shared.k_start + key * a.k.stride[2], a.k.stride[2], a.dim);
  load(pair_of<TileV>(shared.v, pair), shared.v_start + key * a.v.stride[2], a.v.stride[2], a.dim_v);
}

// Computes a tile of keys, the first or the second of a pair. `lanes`: where this lane's rows of q, k and v lie.
template <class Kind>
__device__ inline void Forward<Kind>::compute_half(int pair, int half, const Lanes& lanes, const QRows& q_rows,
                                                   Softmax (&softmax)[kRowBlocks], O& o) const {
  const int tile = 2 * pair + half;
  constexpr int kBlocksOfTile = kKeys / 16;
  const auto multiply = [&](S& s, int tile) {
    typename Operands::template Sums<Forward> sums;
    const auto k_pair = pair_of<TileK>(shared.k, pair);
    if constexpr (Tile::kQRegisters)
      mma_ABt_at(lanes.k, sums, q_rows, k_pair, Operands::kBegin, half * kBlocksOfTile);
    else
      mma_ABt_at(lanes.q, lanes.k, sums, q(), k_pair, Operands::kBegin, half * kBlocksOfTile);
    Operands::take_sums(*this, sums, s, tile);
    take_logits(s, tile, false);
  };
  S s;
  multiply(s, tile);
  P p;
  if constexpr (Tile::kRepeats) {
    const bool first = tile == warp_tiles().last - 1;
    if (first || !take_exp_of_stale_max(s, softmax)) {
      if (!first) multiply(s, ptx::opaque(tile));
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block)
        scale_rows(o[block], softmax[block].template exp_update_max<kExponent>(s[block]));
    }
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) Operands::convert(*this, s[block], block, tile, p);
  } else {
    Operands::take_exp(*this, s, tile, false, softmax, o, p);
  }
  mma_AB_at(lanes.v, o, p.x, pair_of<TileV>(shared.v, pair), half * kBlocksOfTile);
}

// Computes the tile of queries of this thread block.
template <class Kind>
__device__ inline void Forward<Kind>::run_doubled() const {
  static_assert(Tile::kStages == 4 && !Tile::kLateV && kPlain && !kPairs && !kCompensated<Precision> && kSharers == 1);
  if (!start()) return;
  const bool any = shared.tiles.first < shared.tiles.last;
  int pair = any ? (shared.tiles.last - 1) / 2 : -1;
  if (any) load_pair(pair);
  ptx::cp_async_commit();
  const auto warp = [] { return static_cast<unsigned>(ptx::opaque(static_cast<int>(threadIdx.x))) / 32; };
  Softmax softmax[kRowBlocks];
  O o;
  start_rows(softmax, o);
  QRows q_rows;
  if constexpr (Tile::kQRegisters) {
    ptx::cp_async_wait<1>();
    __syncthreads();
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block)
      load_rows(q_rows[block], q(), static_cast<int>(warp()) * kRowBlocks + block);
  }
#pragma unroll 1
  for (; any && pair >= shared.tiles.first / 2; --pair) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // the pair has arrived, and the one before it has been read
    if (pair > shared.tiles.first / 2) load_pair(pair - 1);
    ptx::cp_async_commit();
    Lanes lanes{.k = pair_of<TileK>(shared.k, pair).lane_right(), .v = pair_of<TileV>(shared.v, pair).lane_down()};
    if constexpr (!Tile::kQRegisters) lanes.q = TileQ::move(q().lane_down(), static_cast<int>(warp()) * kRowBlocks, 0);
#pragma unroll
    for (int half = 1; half >= 0; --half) {
      const SeenTiles& tiles = shared.warp_tiles[warp()];
      const bool seen =
          static_cast<unsigned>(2 * pair + half - tiles.first) < static_cast<unsigned>(tiles.last - tiles.first);
      if (seen) compute_half(pair, half, lanes, q_rows, softmax, o);
    }
  }
  ptx::cp_async_wait<0>();
  write(softmax, o);
}

}  // namespace octet::cuda::sm80
