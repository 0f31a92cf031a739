// The mainloop of the 16-bit forward pass, by one consumer warpgroup. sm90/fwd/forward.h has the algorithm.
#pragma once
#include "cuda/sm90/fwd/epilogue.h"

namespace octet::cuda::sm90 {

// Rows of v that no query sees, or that belong to the next packed sequence, may hold inf or NaN: they become zeros.
template <class Precision, class Dims>
__device__ inline void Forward<Precision, Dims>::clear_rows(unsigned char* tile, int from, int to) const {
  constexpr int kWords = kPanelRowBytes / 16;
  for (int i = from * kWords + threadIdx.x % kWarpgroup; i < to * kWords; i += kWarpgroup)
    for (int panel = 0; panel < TileV::kPanels; ++panel)
      reinterpret_cast<uint4*>(tile + panel * TileV::kPanelBytes)[i] = {0, 0, 0, 0};
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
}

// exp(logit) = 2^(scale_log2 x) for the two queries of this thread; one of zeros, or that sees no key, counts as one
// with step 1.
template <class Precision, class Dims>
__device__ inline RowValues Forward<Precision, Dims>::softmax_scale_log2(const TileInfo& q_tile, int query) const {
  RowValues scale_log2{a.scale_log2e, a.scale_log2e};
  if constexpr (kQuantizedQk)
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float step = a.q_scale[row_of(q_tile) + min(query + 8 * row, q_tile.q_tokens - 1)];
      const KeyRange seen = a.mask.keys_of(query + 8 * row, q_tile.q_tokens, q_tile.k_tokens);
      if (step != 0.f && seen.first < seen.last) scale_log2[row] *= step;
      if (scale_log2[row] == 0.f) scale_log2[row] = kMinScaleLog2;
    }
  return scale_log2;
}

template <class Precision, class Dims>
__device__ inline auto Forward<Precision, Dims>::start_softmax(const TileInfo& q_tile, int query) const {
  if constexpr (kHasBeta<Precision>)
    return ShiftedSoftmax{{softmax_scale_log2(q_tile, query)}, a.beta, a.beta_reach};
  else
    return OnlineSoftmax{softmax_scale_log2(q_tile, query)};
}

template <class Precision, class Dims>
__device__ inline void Forward<Precision, Dims>::save_tile(const Block& block, int warpgroup) const {
  const int word = min(threadIdx.x % 32, static_cast<unsigned>(sizeof(TileInfo) / sizeof(int)) - 1);
  reinterpret_cast<int*>(&saved_tile(warpgroup))[word] = reinterpret_cast<const int*>(&block.q_tile)[word];
}

// Warpgroup `warpgroup` of those that compute.
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
    const Keys keys = block.keys, mine = kSkips ? block.of_warpgroup[warpgroup] : keys;
    // opaque() stops hoisting across blocks: S8 operands leave no register for it at d = 256.
    const int query = q_tile.q_start + ptx::opaque(warpgroup) * kWarpgroupRows + fragment_row();
    KeyRange ranges[kRowsPerThread];
    auto softmax = start_softmax(q_tile, query);
    // Down to tile `halfway`, then o is sign-flipped. `twice`: 2, as sums are scaled.
    const bool flips = kFlipsSigns && mine.last - mine.first > 1;
    const int halfway = mine.last - 1 - (mine.last - mine.first) / 2;
    RowValues twice{2.f, 2.f};
    Accumulator<kKeys, typename Precision::Sum> s;
    Accumulator<kKeys> converted;
    Accumulator<kKeys>& x = in_place(s, converted);
    Accumulator<Dims::kDimV> o;
    Operand<typename Precision::PType, kKeys> p;

    // Issued, not awaited.
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
    const auto needs_mask = [&](int tile) {
      return tile * kKeys < mine.all.first || (tile + 1) * kKeys > mine.all.last;
    };
    // Logits x from the product s of a tile.
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
    // What lies before the first and after the last key that is seen, in their tiles of v; where v is a copy, it has
    // zeros there, but for the next packed sequence. Every warpgroup comes here once with each of the two.
    const auto clear_v = [&](int tile) {
      if constexpr (kCompensated<Precision>) {
        if (!a.schedule.cu_seqlens_q || (tile + 1) * kKeys <= q_tile.k_tokens) return;
        wait_v();
        clear_rows(shared.v[v_state.stage], q_tile.k_tokens - tile * kKeys, kKeys);
      } else {
        if (!a.clears) return;
        const KeyRange seen = a.mask.seen(q_tile.q_tokens, q_tile.k_tokens);
        const int before = seen.first - tile * kKeys, end = seen.last - tile * kKeys;
        if (before <= 0 && end >= kKeys) return;
        wait_v();
        clear_rows(shared.v[v_state.stage], 0, before);
        clear_rows(shared.v[v_state.stage], end, kKeys);
      }
      shared.cleared.arrive(), shared.cleared.wait(cleared_phase);
      cleared_phase ^= 1;
    };
    // A tile of which this warpgroup sees nothing.
    const auto skip = [&](int tile) { wait_k(), release_k(), clear_v(tile), wait_v(), release_v(); };

    if constexpr (kSkips)
      for (int tile = keys.last - 1; tile >= max(mine.last, keys.first); --tile) {
        skip(tile);
        if (tile > keys.first) ping_pong_wait(), ping_pong_arrive();
      }
    // The first tile, or half of it.
    const auto begin = [&](auto& s, auto& x) {
      multiply_qk(s, warpgroup, k_state.stage);
      // While the product is under way.
      o.zero();
      ptx::fence_operand(o.x);
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row)
        ranges[row] = a.mask.keys_of(query + 8 * row, q_tile.q_tokens, q_tile.k_tokens);
      ptx::wgmma_wait<0>();
      take_logits(s, x);
      release_k();
      mask(x, mine.last - 1);
      softmax.template exp_update_max<Precision::kPExponent>(x);
      convert(x, p);
    };
    if (mine.any()) {
      wait_k();
      if constexpr (kHalves) {
        Accumulator<kKeys / 2> half;
        mine.end <= (mine.last - 1) * kKeys + kKeys / 2 ? begin(half, half) : begin(s, x);
      } else {
        begin(s, x);
      }
      clear_v(mine.last - 1);
      if (mine.last - 1 > mine.first) wait_k();
    }
    int tile = mine.last - 2;
    // Two loops where o is sign-flipped between: a branch within the loop over tiles would cost 2 %.
#pragma unroll 1
    for (int half = kFlipsSigns ? 0 : 1; half < 2; ++half) {
      for (const int first = half ? mine.first : halfway; tile >= first; --tile) {
        ping_pong_wait();
        multiply_qk(s, warpgroup, k_state.stage);
        wait_v();
        multiply_pv();
        ping_pong_arrive();
        ptx::wgmma_wait<1>();
        take_logits(s, x);
        if constexpr (!kQuantizedQk) mask(x, tile);
        if constexpr (kHasBeta<Precision>) {
          // Ties are counted in every tile.
          const RowValues rescale = softmax.template exp_update_max<Precision::kPExponent>(x);
          ptx::fence_operand(x.x);
          release_k();
          // Waiting here splits the block of instructions, as the vote below does.
          if (tile > mine.first) wait_k();
          ptx::wgmma_wait<0>();
          ptx::fence_operand(o.x);
          scale_rows(o, rescale);
        } else {
          // Over the maximum of former tiles; in the rare case that it is too small, the tile is done over. So are
          // tiles of quantized values with a mask, whose branch would keep scales from being multiplied between
          // exponentials.
          const RowValues sum = softmax.template exp_stale_max<Precision::kPExponent>(x);
          const bool fits =
              sum[0] <= Precision::kMaxP && sum[1] <= Precision::kMaxP && !(kQuantizedQk && needs_mask(tile));
          ptx::fence_operand(x.x);
          // This split of the block of instructions keeps ptxas from waiting for the product with v before the
          // exponentials, which would then run after it instead of beside it.
          if (ptx::all_of_warpgroup(fits, kVoteBarrier + warpgroup)) {
            softmax.l[0] += sum[0], softmax.l[1] += sum[1];
            ptx::wgmma_wait<0>();
            ptx::fence_operand(o.x);
          } else {
            // opaque() stops hoisting: the addresses of both products would be computed ahead of the first.
            multiply_qk(s, ptx::opaque(warpgroup), ptx::opaque(k_state.stage));
            ptx::wgmma_wait<0>();
            ptx::fence_operand(o.x);
            take_logits(s, x);
            mask(x, tile);
            const RowValues rescale = softmax.template exp_update_max<Precision::kPExponent>(x);
            scale_rows(o, rescale);
            twice[0] *= rescale[0], twice[1] *= rescale[1];
          }
          release_k();
          if (tile > mine.first) wait_k();
        }
        release_v();
        convert(x, p);
      }
      if (kFlipsSigns && !half && flips) flip_signs(o, partial(warpgroup)), twice = {2.f, 2.f};
    }
    if constexpr (!kThroughQ) save_tile(block, warpgroup), shared.q_pipe.empty[q_state.stage].arrive();
    VMean v_mean;
    if constexpr (kVMeanEarly) v_mean = v_mean_of(q_tile);  // on its way during the last product
    if (mine.any()) {
      if (!kCompensated<Precision> && mine.first < mine.last - 1) clear_v(mine.first);
      wait_v();
      multiply_pv();
      ptx::wgmma_wait<0>();
      ptx::fence_operand(o.x);
      release_v();
      if constexpr (kSkips)
        for (int left = mine.first - 1; left >= keys.first; --left) ping_pong_wait(), ping_pong_arrive(), skip(left);
    } else {
      o.zero();
      ptx::fence_operand(o.x);  // or, at d = 256, zeros would pass through local memory
    }
    if constexpr (kFlipsSigns)
      if (flips) unflip_signs(o, partial(warpgroup), twice);
    bool spoiled = write(q_tile, query, softmax, v_mean, o, shared.q[q_state.stage], warpgroup);
    if constexpr (kCompensated<Precision>) {  // rows without keys are set to 0, and tell nothing
      const KeyRange seen = a.mask.keys_of(query, q_tile.q_tokens, q_tile.k_tokens);
      spoiled |= seen.first == seen.last;
    }
    if (a.mask.windowed && __any_sync(~0u, spoiled))
      recompute_rows(kThroughQ ? shared.block[ptx::opaque(q_state.stage)].q_tile : saved_tile(ptx::opaque(warpgroup)),
                     ptx::opaque(warpgroup));
    if constexpr (kThroughQ) {
      ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
      shared.q_pipe.empty[q_state.stage].arrive();
    }
  }
}

}  // namespace octet::cuda::sm90
