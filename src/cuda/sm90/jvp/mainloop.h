// The mainloop of the jvp pass, by one consumer warpgroup. sm90/jvp/jvp.h has the algorithm.
#pragma once
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90/jvp/epilogue.h"

namespace octet::cuda::sm90 {

// Issues [t s] = q [tk; k]^T and t += tq k^T. ptxas takes the first registers of a product for another one as they are;
// others it would copy, and wait for each product.
template <class T, class Dims>
__device__ void Jvp<T, Dims>::multiply_qk(int warpgroup, int stage, TS& ts) const {
  ptx::wgmma_fence();
  mma_ABt(ts, q(), warpgroup * kWarpgroupRows, tk_k(stage), false);
  mma_ABt(first_half(ts), tq(), warpgroup * kWarpgroupRows, k(stage), true);
  ptx::wgmma_commit();
}

// Issues [u o] += p [tv v] and u += h v.
template <class T, class Dims>
__device__ void Jvp<T, Dims>::multiply_pv(int warpgroup, int stage, UO& uo) const {
  ptx::wgmma_fence();
  if constexpr (kWholePanels) {
    mma_AB(uo, tile_p(warpgroup), tv_v(stage));
  } else {
    mma_AB(first_half(uo), tile_p(warpgroup), tv(stage));
    mma_AB(second_half(uo), tile_p(warpgroup), v(stage));
  }
  mma_AB(first_half(uo), tile_h(warpgroup), v(stage));
  ptx::wgmma_commit();
}

// Clears the rows of a tile of v and tv before the first and after the last key that any query sees. All warpgroups
// call this for each tile.
template <class T, class Dims>
__device__ void Jvp<T, Dims>::clear_v(const Block& block, int tile, const Position& at) const {
  if (!a.clears) return;
  const Interval seen = a.mask.seen(block.q_tile.q_tokens, block.q_tile.k_tokens);
  const int before = seen.first - tile * kKeys, end = seen.last - tile * kKeys;
  if (before <= 0 && end >= kKeys) return;
  wait_v(at);
  clear_rows(tv_v(at.stage), 0, before), clear_rows(tv_v(at.stage), max(end, 0), kKeys);
  ptx::barrier_sync(kClearedBarrier, kConsumerThreads);
}

// Releases tiles [from, to) that none of this warpgroup's queries sees, from the last to the first. It takes the turns
// in which the others issue q k^T of these tiles, before they clear rows with it, or, after its own tiles, those in
// which they issue p v.
template <class T, class Dims>
__device__ void Jvp<T, Dims>::skip(int warpgroup, const Block& block, int from, int to, Position& at) const {
  const bool before_own = to == block.tiles.last;
  for (int tile = to - 1; tile >= from; --tile, at.advance()) {
    if (before_own) wait_turn(warpgroup), end_turn(warpgroup);
    wait_k(at), shared.k_pipe.empty[at.stage].arrive();
    clear_v(block, tile, at);
    wait_v(at), shared.v_pipe.empty[at.stage].arrive();
    if (!before_own) wait_turn(warpgroup), end_turn(warpgroup);
  }
}

// Turns logits and their tangents into p and h, rounded, and returns the sums of these.
template <class T, class Dims>
__device__ auto Jvp<T, Dims>::exponentials(const TS& ts, const Rows& rows, P& p, P& h) const -> Sums {
  const float origin[] = {origin_of(rows.m[0]), origin_of(rows.m[1])};
  Sums sums;
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) {
    const int row = i % 2;
    float x[2], y[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int element = 2 * i + c;
      x[c] = ptx::exp2(__fmaf_rn(ts.x[kKeys / 2 + element], a.scale_log2e, -origin[row]));
      y[c] = x[c] * __fmaf_rn(ts.x[element], a.scale, -rows.centre[row]);
    }
    p.x[i] = ptx::pack<T>(x[0], x[1]), h.x[i] = ptx::pack<T>(y[0], y[1]);
    const float2 of_p = ptx::unpack<T>(p.x[i]), of_h = ptx::unpack<T>(h.x[i]);
    sums.l[row] += of_p.x, sums.l[row] += of_p.y, sums.r[row] += of_h.x, sums.r[row] += of_h.y;
  }
  return sums;
}

// Writes p and h to shared memory. The barrier of the turn in which they are multiplied makes all of them visible.
template <class T, class Dims>
__device__ void Jvp<T, Dims>::write_p_and_h(int warpgroup, const P& p, const P& h) const {
  const int offset = ptx::opaque(store_offset());
  octet::cuda::store(p, tile_p(warpgroup), 0, offset), octet::cuda::store(h, tile_h(warpgroup), 0, offset);
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
}

// Raises the maximum to that of a tile, rescales what belongs to the former one, and sets the centre of rows that see
// their first keys.
template <class T, class Dims>
__device__ void Jvp<T, Dims>::raise_max(const TS& ts, Rows& rows, UO& uo) const {
  const Accumulator<kKeys>& s = second_half(ts);
  RowValues rescale;
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    const float old = rows.m[row], most = quad_max(row_max(s, row, old)), origin = origin_of(most);
    rescale[row] = ptx::exp2(old * a.scale_log2e - origin);
    rows.m[row] = most;
    rows.l[row] *= rescale[row], rows.r[row] *= rescale[row];
    const bool starts = old == -INFINITY && most != -INFINITY;
    if (!__any_sync(~0u, starts)) continue;
    float sum = 0.f, weighted = 0.f;
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int element = 4 * i + 2 * row + c;
        const float x = ptx::exp2(__fmaf_rn(s.x[element], a.scale_log2e, -origin));
        sum += x, weighted = __fmaf_rn(x, ts.x[element], weighted);
      }
    sum = quad_sum(sum), weighted = quad_sum(weighted);
    if (starts) rows.centre[row] = a.scale * weighted * ptx::exp2(-log2f(sum));
  }
  scale_rows(uo, rescale);
}

// Hides the keys that rows do not see: their logits become -inf, the tangents of these, which may be anything, 0. Rows
// beyond the last query see what that one does, so that no key that no query sees makes the warpgroup repeat a tile.
template <class T, class Dims>
__device__ void Jvp<T, Dims>::mask(int warpgroup, const Block& block, int tile, TS& ts) const {
  const TileInfo& q_tile = block.q_tile;
  const int query = q_tile.q_start + ptx::opaque(warpgroup) * kWarpgroupRows + fragment_row();
  Interval ranges[kRowsPerThread];
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row)
    ranges[row] = a.mask.keys_of(min(query + 8 * row, q_tile.q_tokens - 1), q_tile.q_tokens, q_tile.k_tokens);
  mask_rows(second_half(ts), tile * kKeys, ranges);
  mask_rows(first_half(ts), tile * kKeys, ranges, 0.f);
}

// Turns the products of a tile into p and h over a maximum that is not below theirs.
template <class T, class Dims>
__device__ void Jvp<T, Dims>::exp_raised_max(int warpgroup, const Block& block, int tile, TS& ts, Rows& rows,
                                             UO& uo) const {
  if (needs_mask<kKeys>(block.warpgroup_tiles[warpgroup], tile)) mask(warpgroup, block, tile, ts);
  raise_max(ts, rows, uo);
  P p, h;
  rows.add(exponentials(ts, rows, p, h));
  write_p_and_h(warpgroup, p, h);
}

// The same over the stale maximum, if they fit that and no key is hidden, while those of the tile before it are
// multiplied by v, which is released.
template <class T, class Dims>
__device__ void Jvp<T, Dims>::exp_stale_max(int warpgroup, const Block& block, int tile, const Position& at,
                                            const Position& at_v, TS& ts, Rows& rows, UO& uo) const {
  const auto wait_pv = [&] {
    ptx::wgmma_wait<0>();
    ptx::fence_operand(uo.x);
    shared.v_pipe.empty[at_v.stage].arrive();
  };
  // In a masked tile rows may see their first keys.
  if (needs_mask<kKeys>(block.warpgroup_tiles[warpgroup], tile)) {
    wait_pv();
    ptx::fence_operand(ts.x);
  } else {
    ptx::wgmma_wait<1>();
    ptx::fence_operand(ts.x);
    P p, h;
    const Sums sums = exponentials(ts, rows, p, h);
    bool fits = true;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row)
      fits &= rows.m[row] != -INFINITY && sums.l[row] <= kMaxP && fabsf(sums.r[row]) <= kMaxH;
    // The vote splits the basic block. Else ptxas would wait for p v before the exponentials.
    if (ptx::all_of_warpgroup(fits, kVoteBarrier + warpgroup)) {
      rows.add(sums);
      wait_pv();
      write_p_and_h(warpgroup, p, h);
      return;
    }
    wait_pv();
    // opaque() stops hoisting: the addresses of both products would be computed ahead of the first.
    multiply_qk(ptx::opaque(warpgroup), ptx::opaque(at.stage), ts);
    ptx::wgmma_wait<0>();
    ptx::fence_operand(ts.x);
  }
  exp_raised_max(warpgroup, block, tile, ts, rows, uo);
}

// Computes all tiles of queries, as consumer warpgroup `warpgroup`.
template <class T, class Dims>
__device__ void Jvp<T, Dims>::consume(int warpgroup) {
  PipelineState<1> q_state;
  Position at;
  if (warpgroup == Tile::kWarpgroups - 1) end_turn(warpgroup);
  for (;; q_state.advance()) {
    shared.q_pipe.full[0].wait(q_state.phase);
    const Block& block = shared.block[q_state.phase];
    if (!block.q_tile.valid()) return;
    const SeenTiles& own = block.warpgroup_tiles[warpgroup];
    Rows rows;
    TS ts;
    UO uo;
    uo.zero();
    ptx::fence_operand(uo.x);
    if constexpr (kSkips) skip(warpgroup, block, max(own.last, block.tiles.first), block.tiles.last, at);
    // The first q k^T.
    Position at_v = at;
    wait_turn(warpgroup);
    if (own.any()) {
      wait_k(at);
      multiply_qk(warpgroup, at.stage, ts);
      end_turn(warpgroup);
      ptx::wgmma_wait<0>();
      ptx::fence_operand(ts.x);
      exp_raised_max(warpgroup, block, own.last - 1, ts, rows, uo);
      shared.k_pipe.empty[at.stage].arrive();
      clear_v(block, own.last - 1, at);
      at.advance();
    } else {
      end_turn(warpgroup);
    }
#pragma unroll 1
    for (int tile = own.last - 2; tile >= own.first; --tile) {
      // q k^T of this tile, then p v of the one before.
      wait_turn(warpgroup);
      wait_k(at);
      multiply_qk(warpgroup, at.stage, ts);
      wait_v(at_v);
      multiply_pv(warpgroup, at_v.stage, uo);
      end_turn(warpgroup);
      exp_stale_max(warpgroup, block, tile, at, at_v, ts, rows, uo);
      shared.k_pipe.empty[at.stage].arrive();
      clear_v(block, tile, at);
      at_v = at;
      at.advance();
    }
    shared.q_pipe.empty[0].arrive();
    // The last p v. A warpgroup that has skipped all tiles has had as many turns as the others by now.
    if (own.any()) {
      wait_turn(warpgroup);
      wait_v(at_v);
      multiply_pv(warpgroup, at_v.stage, uo);
      end_turn(warpgroup);
      ptx::wgmma_wait<0>();
      ptx::fence_operand(uo.x);
      shared.v_pipe.empty[at_v.stage].arrive();
    }
    if constexpr (kSkips) skip(warpgroup, block, block.tiles.first, own.any() ? own.first : block.tiles.first, at);
    write(warpgroup, block, rows, uo);
  }
}

}  // namespace octet::cuda::sm90
