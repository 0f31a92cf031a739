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
  mma_AB(uo, p(warpgroup), tv_v(stage));
  mma_AB(first_half(uo), h(warpgroup), v(stage));
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

// Releases tiles [from, to) that none of this warpgroup's queries sees, from the last to the first. Its turn comes
// first, as the others wait for theirs before they clear rows of the tile with this warpgroup.
template <class T, class Dims>
__device__ void Jvp<T, Dims>::skip(int warpgroup, const Block& block, int from, int to, Position& at) const {
  for (int tile = to - 1; tile >= from; --tile, at.advance()) {
    wait_turn(warpgroup), end_turn(warpgroup);
    wait_k(at), shared.k_pipe.empty[at.stage].arrive();
    clear_v(block, tile, at);
    wait_v(at), shared.v_pipe.empty[at.stage].arrive();
  }
}

// Writes four words of a fragment, 16 of its columns, into a tile: a step of `store`.
template <class Tile>
__device__ inline void store_step(const uint32_t (&words)[4], const Tile& tile, int k_step, int offset) {
  ptx::stmatrix(((tile.address() + offset) ^ k_step % 4 * 32) + k_step / 4 * Tile::kPanelBytes, words);
}

// Turns logits and their tangents into p and h, rounded, in shared memory, and returns the sums of these.
template <class T, class Dims>
__device__ auto Jvp<T, Dims>::exponentials(int warpgroup, const TS& ts, const Rows& rows) const -> Sums {
  const float origin[] = {origin_of(rows.m[0]), origin_of(rows.m[1])};
  const int offset = ptx::opaque(store_offset());
  Sums sums;
#pragma unroll
  for (int k_step = 0; k_step < kKeys / 16; ++k_step) {
    uint32_t p_words[4], h_words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i % 2;
      float x[2], y[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int element = 8 * k_step + 2 * i + c;
        x[c] = ptx::exp2(__fmaf_rn(ts.x[kKeys / 2 + element], a.scale_log2e, -origin[row]));
        y[c] = x[c] * __fmaf_rn(ts.x[element], a.scale, -rows.centre[row]);
      }
      p_words[i] = ptx::pack<T>(x[0], x[1]), h_words[i] = ptx::pack<T>(y[0], y[1]);
      const float2 rounded_p = ptx::unpack<T>(p_words[i]), rounded_h = ptx::unpack<T>(h_words[i]);
      sums.l[row] += rounded_p.x, sums.l[row] += rounded_p.y, sums.r[row] += rounded_h.x, sums.r[row] += rounded_h.y;
    }
    store_step(p_words, p(warpgroup), k_step, offset), store_step(h_words, h(warpgroup), k_step, offset);
  }
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
  return sums;
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

// Hides the keys that rows do not see: their logits become -inf, the tangents of these, which may be anything, 0.
template <class T, class Dims>
__device__ void Jvp<T, Dims>::mask(int warpgroup, const Block& block, int tile, TS& ts) const {
  const TileInfo& q_tile = block.q_tile;
  const int query = q_tile.q_start + ptx::opaque(warpgroup) * kWarpgroupRows + fragment_row();
  Interval ranges[kRowsPerThread];
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row)
    ranges[row] = a.mask.keys_of(query + 8 * row, q_tile.q_tokens, q_tile.k_tokens);
  mask_rows(second_half(ts), tile * kKeys, ranges);
  mask_rows(first_half(ts), tile * kKeys, ranges, 0.f);
}

// Turns the products of a tile into p and h, and releases k and tk, and after the last tile q and tq.
template <class T, class Dims>
__device__ void Jvp<T, Dims>::take_exp(int warpgroup, const Block& block, int tile, const Position& at, TS& ts,
                                       Rows& rows, UO& uo) const {
  const SeenTiles& own = block.warpgroup_tiles[warpgroup];
  const bool masked = own.needs_mask(tile, kKeys);
  // The first tile takes its maximum, and so does a masked one, where rows may see their first keys.
  for (bool raises = masked || tile == own.last - 1;; raises = true) {
    if (raises) {
      if (masked) mask(warpgroup, block, tile, ts);
      raise_max(ts, rows, uo);
    }
    const Sums sums = exponentials(warpgroup, ts, rows);
    bool fits = true;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row)
      fits &= rows.m[row] != -INFINITY && sums.l[row] <= kMaxP && fabsf(sums.r[row]) <= kMaxH;
    if (ptx::all_of_warpgroup(fits || raises, kVoteBarrier + warpgroup)) {
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) rows.l[row] += sums.l[row], rows.r[row] += sums.r[row];
      break;
    }
    // opaque() stops hoisting: the addresses of both products would be computed ahead of the first.
    multiply_qk(ptx::opaque(warpgroup), ptx::opaque(at.stage), ts);
    ptx::wgmma_wait<0>();
    ptx::fence_operand(ts.x);
  }
  shared.k_pipe.empty[at.stage].arrive();
  if (tile == own.first) shared.q_pipe.empty[0].arrive();
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
    const int first = own.first;
    int tile = own.last - 1;
    Rows rows;
    TS ts;
    UO uo;
    uo.zero();
    ptx::fence_operand(uo.x);
    if constexpr (kSkips) skip(warpgroup, block, max(own.last, block.tiles.first), block.tiles.last, at);
    // The first q k^T.
    wait_turn(warpgroup);
    if (tile >= first) {
      wait_k(at);
      multiply_qk(warpgroup, at.stage, ts);
      end_turn(warpgroup);
      ptx::wgmma_wait<0>();
      ptx::fence_operand(ts.x);
    } else {
      end_turn(warpgroup);
      shared.q_pipe.empty[0].arrive();
    }
    // Exponentials, p v, and q k^T of the next tile.
#pragma unroll 1
    for (; tile >= first; --tile) {
      take_exp(warpgroup, block, tile, at, ts, rows, uo);
      clear_v(block, tile, at);
      wait_turn(warpgroup);
      wait_v(at);
      multiply_pv(warpgroup, at.stage, uo);
      Barrier& v_empty = shared.v_pipe.empty[at.stage];
      at.advance();
      if (tile > first) {
        wait_k(at);
        multiply_qk(warpgroup, at.stage, ts);
        end_turn(warpgroup);
        ptx::wgmma_wait<1>();
        v_empty.arrive();
        ptx::wgmma_wait<0>();
        ptx::fence_operand(ts.x);
      } else {
        end_turn(warpgroup);
        ptx::wgmma_wait<0>();
        v_empty.arrive();
      }
      ptx::fence_operand(uo.x);
    }
    if constexpr (kSkips) skip(warpgroup, block, block.tiles.first, own.any() ? first : block.tiles.first, at);
    write(warpgroup, block, rows, uo);
  }
}

}  // namespace octet::cuda::sm90
