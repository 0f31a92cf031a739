// The mainloop of the 16-bit forward pass, by one consumer warpgroup. sm90/fwd/forward.h has the algorithm.
#pragma once
#include "cuda/sm90/fwd/epilogue.h"

namespace octet::cuda::sm90 {

// Returns scale_log2 of this thread's two queries: exp(logit) = 2^(scale_log2 x). A query of zeros, or one that sees no
// key, is treated as if its scale were 1.
template <class Precision, class Dims>
__device__ inline RowValues Forward<Precision, Dims>::softmax_scale_log2(const TileInfo& q_tile, int query) const {
  RowValues scale_log2{a.scale_log2e, a.scale_log2e};
  if constexpr (kQuantizedQk)
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float q_scale = a.q_scale[a.scheduler.row_of(q_tile) + min(query + 8 * row, q_tile.q_tokens - 1)];
      const Interval seen = a.mask.keys_of(query + 8 * row, q_tile.q_tokens, q_tile.k_tokens);
      if (q_scale != 0.f && seen.first < seen.last) scale_log2[row] *= q_scale;
      if (scale_log2[row] == 0.f) scale_log2[row] = kMinScaleLog2;
    }
  return scale_log2;
}

template <class Precision, class Dims>
__device__ inline auto Forward<Precision, Dims>::start_softmax(const TileInfo& q_tile, int query) const {
  if constexpr (kHasBeta<Precision>)
    return ShiftedSoftmax{{softmax_scale_log2(q_tile, query)}, a.beta, a.beta_limit};
  else if constexpr (kAlibi)
    return OnlineSoftmax{{1.f, 1.f}};  // logits are in base 2
  else if constexpr (kMasked)
    return OnlineSoftmax{{1.f, 1.f}, {kLeastMax, kLeastMax}};
  else
    return OnlineSoftmax{softmax_scale_log2(q_tile, query)};
}

template <class Precision, class Dims>
__device__ inline void Forward<Precision, Dims>::save_tile(const Block& block, int warpgroup) const {
  const int word = min(threadIdx.x % 32, static_cast<unsigned>(sizeof(TileInfo) / sizeof(int)) - 1);
  reinterpret_cast<int*>(&saved_tile(warpgroup))[word] = reinterpret_cast<const int*>(&block.q_tile)[word];
}

// Issues s = q k^T.
template <class Precision, class Dims>
template <class Product>
__device__ inline void Forward<Precision, Dims>::multiply_qk(const Positions& at, int warpgroup, int stage,
                                                             Product& s) const {
  ptx::wgmma_fence();
  if constexpr (kQuantizedQk)
    mma_ABt_8bit(s, q(at.q.stage), warpgroup * kWarpgroupRows, k(stage));
  else
    mma_ABt(s, q(at.q.stage), warpgroup * kWarpgroupRows, k(stage), false);
  ptx::wgmma_commit();
}

// Issues o += p v.
template <class Precision, class Dims>
__device__ inline void Forward<Precision, Dims>::multiply_pv(const Positions& at, const P& p, O& o) const {
  ptx::wgmma_fence();
  mma_AB(o, p, v(at.v.stage));
  ptx::wgmma_commit();
}

// Computes the logits x from the product s.
template <class Precision, class Dims>
template <class Product, class Logits>
__device__ inline void Forward<Precision, Dims>::take_logits(const Positions& at, Product& s, Logits& x) const {
  ptx::fence_operand(s.x);
  if constexpr (kQuantizedQk) to_floats(s, x), scale_columns(x, shared.k_scale[at.k.stage]);
}

// Clears the rows of a tile of v before the first and after the last key that any query sees. A copy of v has zeros
// there, except for rows of the next packed sequence. All warpgroups call this for each tile that may need it.
template <class Precision, class Dims>
__device__ inline void Forward<Precision, Dims>::clear_v(const TileInfo& q_tile, int tile, const Positions& at) const {
  if constexpr (kCompensated<Precision>) {
    if (!a.scheduler.cu_seqlens_q || (tile + 1) * kKeys <= q_tile.k_tokens) return;
    wait_v(at);
    clear_rows(v(at.v.stage), q_tile.k_tokens - tile * kKeys, kKeys);
  } else {
    if (!a.clears) return;
    const Interval seen = a.mask.seen(q_tile.q_tokens, q_tile.k_tokens);
    const int before = seen.first - tile * kKeys, end = seen.last - tile * kKeys;
    if (before <= 0 && end >= kKeys) return;
    wait_v(at);
    clear_rows(v(at.v.stage), 0, before);
    clear_rows(v(at.v.stage), end, kKeys);
  }
  shared.cleared.arrive(), shared.cleared.wait(at.cleared_phase);
  at.cleared_phase ^= 1;
}

// Skips the tiles after this warpgroup's last key, or before its first. They take turns, as the others do.
template <class Precision, class Dims>
__device__ inline void Forward<Precision, Dims>::skip_last(const Rows& rows, const SeenTiles& tiles,
                                                           const Positions& at) const {
  for (int tile = tiles.last - 1; tile >= max(rows.tiles.last, tiles.first); --tile) {
    skip(rows.q_tile, rows.warpgroup, tile, at);
    if (tile > tiles.first) ping_pong_wait(rows.warpgroup), ping_pong_arrive(rows.warpgroup);
  }
}
template <class Precision, class Dims>
__device__ inline void Forward<Precision, Dims>::skip_first(const Rows& rows, const SeenTiles& tiles,
                                                            const Positions& at) const {
  for (int tile = rows.tiles.first - 1; tile >= tiles.first; --tile)
    ping_pong_wait(rows.warpgroup), ping_pong_arrive(rows.warpgroup), skip(rows.q_tile, rows.warpgroup, tile, at);
}

// The first tile, or its first half: q k^T and softmax.
template <class Precision, class Dims>
template <class Product, class Logits>
__device__ inline void Forward<Precision, Dims>::begin(const Rows& rows, const Positions& at, Product& s, Logits& x,
                                                       P& p) const {
  multiply_qk(at, rows.warpgroup, at.k.stage, s);
  // Work that overlaps with the product.
  rows.o.zero();
  ptx::fence_operand(rows.o.x);
  if constexpr (!kMasked) find_ranges(rows, rows.query, rows.ranges);
  ptx::wgmma_wait<0>();
  take_logits(at, s, x);
  if constexpr (kMasked) mask_tile(at, rows.warpgroup).add(x), release_mask(rows.warpgroup);
  release_k(at);
  if constexpr (kAlibi) alibi_tile(at, rows.query, rows.tiles.last - 1).add(x, rows.ranges);
  mask(rows, x, rows.tiles.last - 1);
  rows.softmax.template exp_update_max<Precision::kPExponent>(x);
  convert_p(rows, rows.tiles.last - 1, x, p);
}

// Turns the logits of a tile, or with ALiBi its products, into P over the stale maximum, and returns their sums.
template <class Precision, class Dims>
__device__ inline RowValues Forward<Precision, Dims>::exp_stale_max(const Rows& rows, const Positions& at, int tile,
                                                                    X& x, bool& is_linear) const {
  constexpr int kExponent = Precision::kPExponent;
  if constexpr (kAlibi)
    return alibi_tile(at, rows.query, tile).template exp_stale_max<kExponent>(x, rows.ranges, rows.softmax, is_linear);
  else if constexpr (kMasked)
    return mask_tile(at, rows.warpgroup).template exp_stale_max<kExponent>(x, rows.softmax);
  else
    return rows.softmax.template exp_stale_max<kExponent>(x);
}

// Repeats a tile, of which P over the stale maximum is too large, with a new maximum.
template <class Precision, class Dims>
__device__ inline void Forward<Precision, Dims>::repeat(const Rows& rows, const Positions& at, int tile, S& s,
                                                        X& x) const {
  // opaque() stops hoisting: the addresses of both products would be computed ahead of the first.
  multiply_qk(at, ptx::opaque(rows.warpgroup), ptx::opaque(at.k.stage), s);
  ptx::wgmma_wait<0>();
  ptx::fence_operand(rows.o.x);
  take_logits(at, s, x);
  if constexpr (kAlibi) alibi_tile(at, rows.query, tile).add(x, rows.ranges);
  if constexpr (kMasked) mask_tile(at, rows.warpgroup).add(x);
  mask(rows, x, tile);
  const RowValues rescale = rows.softmax.template exp_update_max<Precision::kPExponent>(x);
  scale_rows(rows.o, rescale);
  rows.twice[0] *= rescale[0], rows.twice[1] *= rescale[1];
}

// The epilogue of a tile of queries.
template <class Precision, class Dims>
__device__ inline void Forward<Precision, Dims>::finish(const Rows& rows, VMean& v_mean, const Positions& at) const {
  const bool no_key =
      kMasked && kCompensated<Precision> && quad_sum(rows.softmax.l[0]) == 0.f && rows.query < rows.q_tile.q_tokens;
  bool nonfinite = write(rows.q_tile, rows.query, rows.softmax, v_mean, rows.o, shared.q[at.q.stage], rows.warpgroup);
  if constexpr (kCompensated<Precision>) {  // a row without keys is set to 0, whatever it has met
    const Interval seen = a.mask.keys_of(rows.query, rows.q_tile.q_tokens, rows.q_tile.k_tokens);
    nonfinite |= seen.first == seen.last || no_key;
  }
  if ((a.mask.windowed || kDrops || kMasked) && __any_sync(~0u, nonfinite)) {
    __syncwarp();  // save_tile() is done
    recompute_rows(kThroughQ ? shared.block[ptx::opaque(at.q.stage)].q_tile : saved_tile(ptx::opaque(rows.warpgroup)),
                   ptx::opaque(rows.warpgroup));
  }
  if constexpr (kThroughQ) {
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
    shared.q_pipe.empty[at.q.stage].arrive();
  }
}

// Computes all tiles of queries, as consumer warpgroup `warpgroup`.
template <class Precision, class Dims>
__device__ inline void Forward<Precision, Dims>::consume(int warpgroup) {
  PipelineState<Tile::kQStages> q_state;
  PipelineState<Tile::kStages> k_state, v_state;
  uint32_t cleared_phase = 0;
  const Positions at{q_state, k_state, v_state, cleared_phase};
  if (warpgroup == Tile::kWarpgroups - 1) ping_pong_arrive(warpgroup);
  for (;; at.q.advance()) {
    shared.q_pipe.full[at.q.stage].wait(at.q.phase);
    const Block& block = shared.block[at.q.stage];
    const TileInfo q_tile = block.q_tile;
    if (!q_tile.valid()) return;
    const SeenTiles tiles = block.tiles, own = kSkips ? block.warpgroup_tiles[warpgroup] : tiles;
    // opaque() stops hoisting across tiles of queries: int8 q and k at d = 256 have no spare register.
    const int query = q_tile.q_start + ptx::opaque(warpgroup) * kWarpgroupRows + fragment_row();
    Interval ranges[kRowsPerThread];
    auto softmax = start_softmax(q_tile, query);
    // o is sign-flipped after tile `halfway`.
    const bool flips = kFlipsSigns && own.last - own.first > 1;
    const int halfway = own.last - 1 - (own.last - own.first) / 2;
    RowValues twice{2.f, 2.f};
    S s;
    X converted;
    X& x = in_place(s, converted);
    O o;
    P p;
    const Rows rows{warpgroup, q_tile, own, query, ranges, softmax, o, twice};
    save_row_biases(q_tile, warpgroup, query);

    if constexpr (kSkips) skip_last(rows, tiles, at);
    // First tile: q k^T and softmax.
    if (own.any()) {
      wait_k(at);
      if constexpr (kHalves) {
        Accumulator<kKeys / 2> half;
        own.end <= (own.last - 1) * kKeys + kKeys / 2 ? begin(rows, at, half, half, p) : begin(rows, at, s, x, p);
      } else {
        begin(rows, at, s, x, p);
      }
      clear_v(q_tile, own.last - 1, at);
      if (own.last - 1 > own.first) wait_k(at);
    }
    int tile = own.last - 2;
    // All other tiles but for the last p v. There are two loops, as a branch for the sign flip within one costs 2 %.
#pragma unroll 1
    for (int half = kFlipsSigns ? 0 : 1; half < 2; ++half) {
      for (const int first = half ? own.first : halfway; tile >= first; --tile) {
        // Ping-pong: issue q k^T of this tile and p v of the tile before.
        ping_pong_wait(warpgroup);
        multiply_qk(at, warpgroup, at.k.stage, s);
        wait_v(at);
        multiply_pv(at, p, o);
        ping_pong_arrive(warpgroup);
        Drawn drawn = start_draw(rows, tile);
        // Wait for q k^T; softmax; wait for p v.
        ptx::wgmma_wait<1>();
        take_logits(at, s, x);
        if constexpr (!kQuantizedQk)
          if (needs_mask<kKeys>(own, tile)) {
            hide(rows, x, tile);
            if constexpr (kStartsLate) softmax.start_max(x);
          }
        if constexpr (kHasBeta<Precision>) {
          // Bias correction beta updates the maximum in every tile, as it counts ties.
          const RowValues rescale = softmax.template exp_update_max<Precision::kPExponent>(x);
          ptx::fence_operand(x.x);
          release_k(at);
          // A wait here splits the basic block, as the vote below does.
          if (tile > own.first) wait_k(at);
          ptx::wgmma_wait<0>();
          ptx::fence_operand(o.x);
          scale_rows(o, rescale);
        } else {
          // Exp with the stale maximum; a tile is repeated where this is too small, or where quantized values need a
          // mask: a branch here would keep ptxas from interleaving the products by scales with the exponentials.
          bool is_linear = true;
          const RowValues sum = exp_stale_max(rows, at, tile, x, is_linear);
          if constexpr (kDrawsBesideExp) drawn.beside(x);
          const bool fits = p_fits(softmax, sum) && is_linear && !(kQuantizedQk && needs_mask<kKeys>(own, tile));
          ptx::fence_operand(x.x);
          // The vote splits the basic block. Else ptxas would wait for p v before the exponentials, which would then
          // run after that product instead of beside it.
          if (ptx::all_of_warpgroup(fits, kVoteBarrier + warpgroup)) {
            softmax.l[0] += sum[0], softmax.l[1] += sum[1];
            ptx::wgmma_wait<0>();
            ptx::fence_operand(o.x);
          } else {
            repeat(rows, at, tile, s, x);
          }
          // Release k; wait for the next.
          release_mask(warpgroup), release_k(at);
          if (tile > own.first) wait_k(at);
        }
        // Release v; convert p for the next p v.
        release_v(at);
        convert_p(rows, tile, x, drawn, p);
      }
      if (kFlipsSigns && !half && flips) flip_signs(o, partial(warpgroup)), twice = {2.f, 2.f};
    }
    // Release q, unless o is stored through it.
    if constexpr (!kThroughQ) save_tile(block, warpgroup), shared.q_pipe.empty[at.q.stage].arrive();
    VMean v_mean;
    if constexpr (kVMeanEarly) v_mean = v_mean_of(q_tile);  // overlaps with the last product
    // Last p v.
    if (own.any()) {
      if (!kCompensated<Precision> && own.first < own.last - 1) clear_v(q_tile, own.first, at);
      wait_v(at);
      multiply_pv(at, p, o);
      ptx::wgmma_wait<0>();
      ptx::fence_operand(o.x);
      release_v(at);
      if constexpr (kSkips) skip_first(rows, tiles, at);
    } else {
      o.zero();
      ptx::fence_operand(o.x);  // without the fence, the zeros pass through local memory at d = 256
    }
    if constexpr (kFlipsSigns)
      if (flips) unflip_signs(o, partial(warpgroup), twice);
    finish(rows, v_mean, at);
  }
}

}  // namespace octet::cuda::sm90
