// The mainloops of the 8-bit forward pass, by one consumer warpgroup. sm90/fwd/forward_8bit.h has the algorithm.
#pragma once
#include "cuda/sm90/fwd/epilogue_8bit.h"

namespace octet::cuda::sm90 {

// Returns scale_log2 of this thread's two queries: exp(logit) = 2^(scale_log2 x). A query of zeros is treated as if its
// scale were 1.
template <class Precision, class Dims>
__device__ inline RowValues Forward8Bit<Precision, Dims>::softmax_scale_log2(const TileInfo& q_tile, int query) const {
  RowValues scale_log2;
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    const int i = min(query + 8 * row, q_tile.q_tokens - 1);
    const float q_scale = a.q_scale ? a.q_scale[a.scheduler.row_of(q_tile) + i] : 1.f;
    scale_log2[row] = a.scale_log2e * (q_scale == 0.f ? 1.f : q_scale);
    if (scale_log2[row] == 0.f) scale_log2[row] = kMinScaleLog2;
  }
  return scale_log2;
}

// Adds r times the scale of p to o.
template <class Precision, class Dims>
__device__ inline void Forward8Bit<Precision, Dims>::add(Accumulator<kColumns>& o, const Accumulator<kColumns, int>& r,
                                                         const RowValues& p_scale) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) o.x[i] = fmaf(static_cast<float>(r.x[i]), p_scale[i / 2 % 2], o.x[i]);
}

template <class Precision, class Dims>
__device__ inline float4 Forward8Bit<Precision, Dims>::with_partial(int warpgroup, int word,
                                                                    const Accumulator<kColumns>& o,
                                                                    const RowValues& by) const {
  const float4 x = partial(warpgroup, word);
  const float* y = &o.x[4 * word];
  return {fmaf(x.x, by[0], y[0]), fmaf(x.y, by[0], y[1]), fmaf(x.z, by[1], y[2]), fmaf(x.w, by[1], y[3])};
}

template <class Precision, class Dims>
__device__ inline void Forward8Bit<Precision, Dims>::add_partial(int warpgroup, Accumulator<kColumns>& o,
                                                                 const RowValues& by) const {
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const float4 x = with_partial(warpgroup, i, o, by);
    o.x[4 * i] = x.x, o.x[4 * i + 1] = x.y, o.x[4 * i + 2] = x.z, o.x[4 * i + 3] = x.w;
  }
}

template <class Precision, class Dims>
__device__ inline void Forward8Bit<Precision, Dims>::store_partial(int warpgroup, const Accumulator<kColumns>& o,
                                                                   const RowValues& by, bool first) const {
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    partial(warpgroup, i) =
        first ? float4{o.x[4 * i], o.x[4 * i + 1], o.x[4 * i + 2], o.x[4 * i + 3]} : with_partial(warpgroup, i, o, by);
}

// Returns the scales of the thread groups of this thread's keys in a tile, or 1 where k has no such scales.
template <class Precision, class Dims>
__device__ inline auto Forward8Bit<Precision, Dims>::group_scales(const Positions& at, int tile) const {
  if constexpr (kKeyScales == KeyScales::groups)
    return scales_of_groups<kKeys>(shared.k_scale[at.kv.stage], tile);
  else
    return no_scales();
}

// Computes x from the product s of a tile.
template <class Precision, class Dims>
__device__ inline void Forward8Bit<Precision, Dims>::take_logits(const Positions& at, const Softmax& softmax,
                                                                 const Sums& s, Accumulator<kKeys>& x) const {
  to_floats(s, x);
  if constexpr (kKeyScales == KeyScales::tokens) scale_columns(x, shared.k_scale[at.kv.stage]);
  if constexpr (kScaled) softmax.add_log_scales(x, shared.v_scale[at.kv.stage][0]);
}

template <class Precision, class Dims>
__device__ inline void Forward8Bit<Precision, Dims>::mask(int warpgroup, const TileInfo& q_tile, const SeenTiles& tiles,
                                                          int tile, Accumulator<kKeys>& x, float masked) const {
  if (needs_mask(tiles, tile)) {
    const int query = query_of(q_tile, warpgroup);
    const Interval ranges[] = {keys_of(q_tile, query), keys_of(q_tile, query + 8)};
    mask_rows(x, tile * kKeys, ranges, masked);
  }
}

// Computes all tiles of queries, as consumer warpgroup `warpgroup`.
template <class Precision, class Dims>
__device__ inline void Forward8Bit<Precision, Dims>::consume(int warpgroup) {
  Positions at;
  at.ping_pong = warpgroup == 0;
  for (unsigned block = 0;; ++block) {
    at.q = block % Tile::kQStages;
    shared.q_pipe.full[at.q].wait(block / Tile::kQStages % 2);
    const TileInfo& q_tile = shared.q_tile[block % (Tile::kQStages + 1)];
    if (!q_tile.valid()) return;
    const SeenTiles tiles = tiles_of(q_tile, q_tile.q_start, kRows);
    const SeenTiles own =
        Tile::kSkips ? tiles_of(q_tile, q_tile.q_start + warpgroup * kWarpgroupRows, kWarpgroupRows) : tiles;
    Softmax softmax{softmax_scale_log2(q_tile, query_of(q_tile, warpgroup))};
    Accumulator<kColumns> o;
    o.zero();
    // Skip the tiles after this warpgroup's last key. A tile of queries has one stage more than it has tiles of keys,
    // as v comes a stage later than k.
    if constexpr (Tile::kSkips)
      for (int i = own.any() ? tiles.last - own.last : tiles.any() ? tiles.last - tiles.first + 1 : 0; i > 0; --i)
        skip(at);
    // All tiles that this warpgroup sees.
    if (own.any()) {
      if constexpr (kScaled)
        attend_scaled(warpgroup, q_tile, own, at, softmax, o);
      else
        attend(warpgroup, q_tile, own, at, softmax, o);
    }
    // Release q; skip the tiles before this warpgroup's first key; epilogue.
    shared.q_pipe.empty[at.q].arrive();
    if constexpr (Tile::kSkips)
      for (int i = own.any() ? own.first - tiles.first : 0; i > 0; --i) skip(at);
    if (q_tile.q_start + warpgroup * kWarpgroupRows < end_of(q_tile))
      write(q_tile, query_of(q_tile, warpgroup), softmax, o);
  }
}

// The mainloop for P without a scale for each tile. The product s of a tile runs together with the product p v of the
// tile before, as in the 16-bit mainloop.
template <class Precision, class Dims>
__device__ inline void Forward8Bit<Precision, Dims>::attend(int warpgroup, const TileInfo& q_tile,
                                                            const SeenTiles& tiles, Positions& at, Softmax& softmax,
                                                            Accumulator<kColumns>& o) const {
  Sums s;
  Accumulator<kKeys> converted;
  Accumulator<kKeys>& x = in_place(s, converted);
  Operand<typename Precision::PType, kKeys> p;
  RowValues sum;
  RowValues partial_rescale{1.f, 1.f};  // the factor by which the partial accumulator must be multiplied
  // Returns the number of products with v before that of tile `tile`.
  const auto products_before = [&](int tile) { return tiles.last - 1 - tile; };
  const auto starts_sum = [&](int tile) { return products_before(tile) % kTilesPerSum == 0; };

  const auto mask = [&](int tile, float masked) { this->mask(warpgroup, q_tile, tiles, tile, x, masked); };
  // Computes P with a new scale from the product s of a tile; returns the factor by which o must be multiplied.
  const auto recompute_p = [&](int tile, RowValues& sum) {
    take_logits(at, softmax, s, x);
    mask(tile, -INFINITY);
    const RowValues rescale = softmax.exp_update_max(x, group_scales(at, tile), sum);
    if constexpr (kMasksP) mask(tile, 0.f);
    return rescale;
  };

  // First tile: q k^T and softmax.
  wait_kv(at);
  multiply_k(warpgroup, at, at.kv.stage, s);
  wait_products<0>(s);
  recompute_p(tiles.last - 1, softmax.l);
  pack_P(x, p);
  release_kv(at);
  if (tiles.last - 2 >= tiles.first) wait_kv(at);
  for (int tile = tiles.last - 2; tile >= tiles.first; --tile) {
    // Issue q k^T of this tile and p v of the tile before; wait for q k^T.
    multiply_k(warpgroup, at, at.kv.stage, s);
    multiply_v(at, p, o, !starts_sum(tile + 1));
    wait_products<1>(s);
    take_logits(at, softmax, s, x);
    // Softmax with the stale scale. A tile that does not fit is repeated from q k^T on, and so are the few tiles that
    // need a mask.
    const bool fits = softmax.exp_stale_max(x, group_scales(at, tile), sum) && !needs_mask(tiles, tile);
    ptx::fence_operand(x.x);
    // The vote keeps ptxas from waiting for p v before the exponentials.
    if (ptx::all_of_warpgroup(fits, kVoteBarrier + warpgroup)) {
      wait_products<0>(o);
    } else {
      // Repeat the tile with a new scale. opaque() stops hoisting: the addresses of both products would be computed
      // ahead of the first.
      multiply_k(ptx::opaque(warpgroup), at, ptx::opaque(at.kv.stage), s);
      wait_products<0>(o);
      ptx::fence_operand(s.x);
      const RowValues rescale = recompute_p(tile, sum);
      scale_rows(o, rescale);
      partial_rescale[0] *= rescale[0], partial_rescale[1] *= rescale[1];
    }
    softmax.l[0] += sum[0], softmax.l[1] += sum[1];
    // Release; pack P; add o to the partial accumulator where the next product starts a new sum.
    release_kv(at);
    pack_P(x, p);
    if (starts_sum(tile)) {
      store_partial(warpgroup, o, partial_rescale, products_before(tile) == kTilesPerSum);
      partial_rescale = {1.f, 1.f};
    }
    if (tile > tiles.first) wait_kv(at);
  }
  // Last p v.
  wait_kv(at);
  multiply_v(at, p, o, !starts_sum(tiles.first));
  wait_products<0>(o);
  release_kv(at);
  if (products_before(tiles.first) >= kTilesPerSum) add_partial(warpgroup, o, partial_rescale);
}

// The mainloop for P whose scale changes from tile to tile: the product r = p v has an accumulator of its own, from
// which it is scaled and added to o.
template <class Precision, class Dims>
__device__ inline void Forward8Bit<Precision, Dims>::attend_scaled(int warpgroup, const TileInfo& q_tile,
                                                                   const SeenTiles& tiles, Positions& at,
                                                                   Softmax& softmax, Accumulator<kColumns>& o) const {
  Sums s;
  Accumulator<kKeys> x;
  Accumulator<kColumns, int> r;
  Operand<typename Precision::PType, kKeys> p;
  // First tile: q k^T.
  wait_kv(at);
  multiply_k(warpgroup, at, at.kv.stage, s);
  wait_products<0>(s);
  take_logits(at, softmax, s, x);
  mask(warpgroup, q_tile, tiles, tiles.last - 1, x);
  for (int tile = tiles.last - 1; tile >= tiles.first; --tile) {
    // Softmax and quantization of P, the exponentials in turn (ping-pong).
    const RowValues most = softmax.largest(x, o);
    const RowValues p_scale = softmax.quantize_p(x, most, shared.v_scale[at.kv.stage][1], ping_pong_wait(warpgroup, at),
                                                 LargestCode::of(kLargestU8), p);
    ping_pong_arrive(warpgroup);
    // Release k of this tile; wait for its v, which comes with the next k; issue p v.
    release_kv(at);
    wait_kv(at);
    multiply_v(at, p, r, false);
    if (tile == tiles.first) {
      wait_products<0>(r);
      release_kv(at);
      add(o, r, p_scale);
      break;
    }
    // Issue q k^T of the next tile; add p v to o.
    multiply_k(warpgroup, at, at.kv.stage, s);
    wait_products<1>(r);
    add(o, r, p_scale);
    wait_products<0>(s);
    take_logits(at, softmax, s, x);
    mask(warpgroup, q_tile, tiles, tile - 1, x);
  }
}

}  // namespace octet::cuda::sm90
