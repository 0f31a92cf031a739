// The mainloop of the 16-bit forward pass, by one consumer warpgroup. sm90/fwd/forward.h has the algorithm.
#pragma once
#include "cuda/sm90/fwd/epilogue.h"

namespace octet::cuda::sm90 {

// Sets rows [from, to) of a tile of v to 0: rows that no query sees, or of the next packed sequence, may hold inf or
// NaN, and 0 times these would be NaN.
template <class Precision, class Dims>
__device__ inline void Forward<Precision, Dims>::clear_rows(unsigned char* tile, int from, int to) const {
  constexpr int kWords = kPanelRowBytes / 16;
  for (int i = from * kWords + threadIdx.x % kWarpgroup; i < to * kWords; i += kWarpgroup)
    for (int panel = 0; panel < TileV::kPanels; ++panel)
      reinterpret_cast<uint4*>(tile + panel * TileV::kPanelBytes)[i] = {0, 0, 0, 0};
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
}

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
  else
    return OnlineSoftmax{softmax_scale_log2(q_tile, query)};
}

template <class Precision, class Dims>
__device__ inline void Forward<Precision, Dims>::save_tile(const Block& block, int warpgroup) const {
  const int word = min(threadIdx.x % 32, static_cast<unsigned>(sizeof(TileInfo) / sizeof(int)) - 1);
  reinterpret_cast<int*>(&saved_tile(warpgroup))[word] = reinterpret_cast<const int*>(&block.q_tile)[word];
}

// Computes all tiles of queries, as consumer warpgroup `warpgroup`.
template <class Precision, class Dims>
__device__ inline void Forward<Precision, Dims>::consume(int warpgroup) {
  PipelineState<Tile::kQStages> q_state;
  PipelineState<Tile::kStages> k_state, v_state;
  uint32_t cleared_phase = 0;
  const auto ping_pong_wait = [&] {
    if (Tile::kPingPong) ptx::barrier_sync(kPingPongBarrier + warpgroup, 2 * kWarpgroup);
  };
  const auto ping_pong_arrive = [&] {
    if (Tile::kPingPong) ptx::barrier_arrive(kPingPongBarrier + (warpgroup + 1) % Tile::kWarpgroups, 2 * kWarpgroup);
  };
  if (warpgroup == Tile::kWarpgroups - 1) ping_pong_arrive();
  for (;; q_state.advance()) {
    shared.q_pipe.full[q_state.stage].wait(q_state.phase);
    const Block& block = shared.block[q_state.stage];
    const TileInfo q_tile = block.q_tile;
    if (!q_tile.valid()) return;
    const SeenTiles tiles = block.tiles, own = kSkips ? block.warpgroup_tiles[warpgroup] : tiles;
    // opaque() stops hoisting across tiles of queries: int8 q and k at d = 256 have no spare register.
    const int query = q_tile.q_start + ptx::opaque(warpgroup) * kWarpgroupRows + fragment_row();
    Interval ranges[kRowsPerThread];
    auto softmax = start_softmax(q_tile, query);
    // o is sign-flipped after tile `halfway`. `twice` is 2, rescaled as o is since then.
    const bool flips = kFlipsSigns && own.last - own.first > 1;
    const int halfway = own.last - 1 - (own.last - own.first) / 2;
    RowValues twice{2.f, 2.f};
    Accumulator<kKeys, typename Precision::Sum> s;
    Accumulator<kKeys> converted;
    Accumulator<kKeys>& x = in_place(s, converted);
    Accumulator<Dims::kDimV> o;
    Operand<typename Precision::PType, kKeys> p;

    // The verbs of the mainloop. The products are issued without waiting for them.
    const auto multiply_qk = [&](auto& s, int rows, int stage) {
      ptx::wgmma_fence();
      if constexpr (kQuantizedQk)
        mma_ABt_8bit(s, q(q_state.stage), rows * kWarpgroupRows, k(stage));
      else
        mma_ABt(s, q(q_state.stage), rows * kWarpgroupRows, k(stage), false);
      ptx::wgmma_commit();
    };
    const auto multiply_pv = [&] {
      ptx::wgmma_fence();
      mma_AB(o, p, v(v_state.stage));
      ptx::wgmma_commit();
    };
    const auto needs_mask = [&](int tile) { return tile * kKeys < own.all.first || (tile + 1) * kKeys > own.all.last; };
    // Computes the logits x from the product s.
    const auto take_logits = [&](auto& s, auto& x) {
      ptx::fence_operand(s.x);
      if constexpr (kQuantizedQk) to_floats(s, x), scale_columns(x, shared.k_scale[k_state.stage]);
    };
    const auto mask = [&](auto& x, int tile) {
      if (needs_mask(tile)) mask_rows(x, tile * kKeys, ranges);
    };
    const auto wait_k = [&] { shared.k_pipe.full[k_state.stage].wait(k_state.phase); };
    const auto wait_v = [&] { shared.v_pipe.full[v_state.stage].wait(v_state.phase); };
    const auto release_k = [&] { shared.k_pipe.empty[k_state.stage].arrive(), k_state.advance(); };
    const auto release_v = [&] { shared.v_pipe.empty[v_state.stage].arrive(), v_state.advance(); };
    // Clears the rows of a tile of v before the first and after the last key that any query sees. A copy of v has zeros
    // there, except for rows of the next packed sequence. All warpgroups call this for each tile that may need it.
    const auto clear_v = [&](int tile) {
      if constexpr (kCompensated<Precision>) {
        if (!a.scheduler.cu_seqlens_q || (tile + 1) * kKeys <= q_tile.k_tokens) return;
        wait_v();
        clear_rows(shared.v[v_state.stage], q_tile.k_tokens - tile * kKeys, kKeys);
      } else {
        if (!a.clears) return;
        const Interval seen = a.mask.seen(q_tile.q_tokens, q_tile.k_tokens);
        const int before = seen.first - tile * kKeys, end = seen.last - tile * kKeys;
        if (before <= 0 && end >= kKeys) return;
        wait_v();
        clear_rows(shared.v[v_state.stage], 0, before);
        clear_rows(shared.v[v_state.stage], end, kKeys);
      }
      shared.cleared.arrive(), shared.cleared.wait(cleared_phase);
      cleared_phase ^= 1;
    };
    // Releases a tile that none of this warpgroup's queries sees.
    const auto skip = [&](int tile) { wait_k(), release_k(), clear_v(tile), wait_v(), release_v(); };

    // Skip the tiles after this warpgroup's last key.
    if constexpr (kSkips)
      for (int tile = tiles.last - 1; tile >= max(own.last, tiles.first); --tile) {
        skip(tile);
        if (tile > tiles.first) ping_pong_wait(), ping_pong_arrive();
      }
    // First tile, or its first half: q k^T and softmax.
    const auto begin = [&](auto& s, auto& x) {
      multiply_qk(s, warpgroup, k_state.stage);
      // Work that overlaps with the product.
      o.zero();
      ptx::fence_operand(o.x);
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row)
        ranges[row] = a.mask.keys_of(query + 8 * row, q_tile.q_tokens, q_tile.k_tokens);
      ptx::wgmma_wait<0>();
      take_logits(s, x);
      release_k();
      mask(x, own.last - 1);
      softmax.template exp_update_max<Precision::kPExponent>(x);
      convert(x, p);
    };
    if (own.any()) {
      wait_k();
      if constexpr (kHalves) {
        Accumulator<kKeys / 2> half;
        own.end <= (own.last - 1) * kKeys + kKeys / 2 ? begin(half, half) : begin(s, x);
      } else {
        begin(s, x);
      }
      clear_v(own.last - 1);
      if (own.last - 1 > own.first) wait_k();
    }
    int tile = own.last - 2;
    // All other tiles but for the last p v. There are two loops, as a branch for the sign flip within one costs 2 %.
#pragma unroll 1
    for (int half = kFlipsSigns ? 0 : 1; half < 2; ++half) {
      for (const int first = half ? own.first : halfway; tile >= first; --tile) {
        // Ping-pong: issue q k^T of this tile and p v of the tile before.
        ping_pong_wait();
        multiply_qk(s, warpgroup, k_state.stage);
        wait_v();
        multiply_pv();
        ping_pong_arrive();
        // Wait for q k^T; softmax.
        ptx::wgmma_wait<1>();
        take_logits(s, x);
        if constexpr (!kQuantizedQk) {
          if (needs_mask(tile)) {
            mask_rows(x, tile * kKeys, ranges);
            if constexpr (kStartsLate) softmax.start_max(x);
          }
        }
        if constexpr (kHasBeta<Precision>) {
          // Bias correction beta updates the maximum in every tile, as it counts ties.
          const RowValues rescale = softmax.template exp_update_max<Precision::kPExponent>(x);
          ptx::fence_operand(x.x);
          release_k();
          // A wait here splits the basic block, as the vote below does.
          if (tile > own.first) wait_k();
          ptx::wgmma_wait<0>();
          ptx::fence_operand(o.x);
          scale_rows(o, rescale);
        } else {
          // Exp with the stale maximum. In the rare case that this is too small, the tile is repeated. Tiles of
          // quantized values that need a mask are always repeated, as a branch for the mask here would keep ptxas
          // from interleaving the products by scales with the exponentials.
          const RowValues sum = softmax.template exp_stale_max<Precision::kPExponent>(x);
          const bool fits =
              sum[0] <= Precision::kMaxP && sum[1] <= Precision::kMaxP && !(kQuantizedQk && needs_mask(tile));
          ptx::fence_operand(x.x);
          // The vote splits the basic block. Else ptxas would wait for p v before the exponentials, which would then
          // run after that product instead of beside it.
          if (ptx::all_of_warpgroup(fits, kVoteBarrier + warpgroup)) {
            softmax.l[0] += sum[0], softmax.l[1] += sum[1];
            ptx::wgmma_wait<0>();
            ptx::fence_operand(o.x);
          } else {
            // Repeat the tile with a new maximum. opaque() stops hoisting: the addresses of both products would be
            // computed ahead of the first.
            multiply_qk(s, ptx::opaque(warpgroup), ptx::opaque(k_state.stage));
            ptx::wgmma_wait<0>();
            ptx::fence_operand(o.x);
            take_logits(s, x);
            mask(x, tile);
            const RowValues rescale = softmax.template exp_update_max<Precision::kPExponent>(x);
            scale_rows(o, rescale);
            twice[0] *= rescale[0], twice[1] *= rescale[1];
          }
          // Release k; wait for the next.
          release_k();
          if (tile > own.first) wait_k();
        }
        // Release v; convert p for the next p v.
        release_v();
        convert(x, p);
      }
      // Sign flip between the two loops.
      if (kFlipsSigns && !half && flips) flip_signs(o, partial(warpgroup)), twice = {2.f, 2.f};
    }
    // Release q, unless o is stored through it.
    if constexpr (!kThroughQ) save_tile(block, warpgroup), shared.q_pipe.empty[q_state.stage].arrive();
    VMean v_mean;
    if constexpr (kVMeanEarly) v_mean = v_mean_of(q_tile);  // overlaps with the last product
    // Last p v.
    if (own.any()) {
      if (!kCompensated<Precision> && own.first < own.last - 1) clear_v(own.first);
      wait_v();
      multiply_pv();
      ptx::wgmma_wait<0>();
      ptx::fence_operand(o.x);
      release_v();
      // Skip the tiles before this warpgroup's first key.
      if constexpr (kSkips)
        for (int left = own.first - 1; left >= tiles.first; --left) ping_pong_wait(), ping_pong_arrive(), skip(left);
    } else {
      o.zero();
      ptx::fence_operand(o.x);  // without the fence, the zeros pass through local memory at d = 256
    }
    // Epilogue.
    if constexpr (kFlipsSigns)
      if (flips) unflip_signs(o, partial(warpgroup), twice);
    bool nonfinite = write(q_tile, query, softmax, v_mean, o, shared.q[q_state.stage], warpgroup);
    if constexpr (kCompensated<Precision>) {  // a row without keys is set to 0, whatever it has met
      const Interval seen = a.mask.keys_of(query, q_tile.q_tokens, q_tile.k_tokens);
      nonfinite |= seen.first == seen.last;
    }
    if (a.mask.windowed && __any_sync(~0u, nonfinite)) {
      __syncwarp();  // save_tile() is done
      recompute_rows(kThroughQ ? shared.block[ptx::opaque(q_state.stage)].q_tile : saved_tile(ptx::opaque(warpgroup)),
                     ptx::opaque(warpgroup));
    }
    if constexpr (kThroughQ) {
      ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
      shared.q_pipe.empty[q_state.stage].arrive();
    }
  }
}

}  // namespace octet::cuda::sm90
