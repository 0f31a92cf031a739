// The mainloop of head dims above 256 (backward.h), whose warps have their own channels in every product. s and dp are
// sums over channels, so that warps compute parts of them, which pass through shared memory.
#pragma once
#include "cuda/sm80/bwd/backward.h"

namespace octet::cuda::sm80 {

// Returns this warp's part of v, which load_keys() has asked for where q and do will be. Other mainloops have v in
// shared memory.
template <class Kind>
__device__ typename Backward<Kind>::VPart Backward<Kind>::take_v() const {
  VPart v;
  if constexpr (kWide) {
    static_assert(kKeys / 16 * C::kChannelWarps == C::kWarps && sizeof(shared.q) + sizeof(shared.do_) >= TileK::kBytes);
    const TileK tile{shared.q[0]};
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    const uint32_t at = TileK::move(TileK::lane_right(), key_block(), channel_part() * (kChannels / 16));
#pragma unroll
    for (int k_step = 0; k_step < kChannels / 16; ++k_step) ptx::ldmatrix(v.x[k_step], tile.step(at, 0, k_step));
  }
  return v;
}

// Writes this warp's part of s or dp, of each block of 16 queries and keys four numbers of each lane side by side.
template <class Kind>
__device__ void Backward<Kind>::put_part(const SPart& x, float* parts) const {
  float* const to = parts + (channel_part() * kSWarps + key_block() * (kQueries / 16)) * 256 + ptx::opaque(lane) * 4;
#pragma unroll
  for (int m = 0; m < kQueries / 16; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* const from = &x[m].x[4 * i];
      *reinterpret_cast<float4*>(to + m * 256 + i * 128) = {from[0], from[1], from[2], from[3]};
    }
}

// Sets x to the sum of its parts.
template <class Kind>
__device__ void Backward<Kind>::add_parts(TileS& x, const float* parts) const {
  const float* const from = parts + ptx::opaque(warp) * 256 + ptx::opaque(lane) * 4;
  x[0].zero();
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int part = 0; part < C::kChannelWarps; ++part) {
      const float4 y = *reinterpret_cast<const float4*>(from + part * (kSWarps * 256) + i * 128);
      float* const to = &x[0].x[4 * i];
      to[0] += y.x, to[1] += y.y, to[2] += y.z, to[3] += y.w;
    }
}

// Computes this warp's parts of s = q k^T and dp = do v^T.
template <class Kind>
__device__ void Backward<Kind>::multiply_parts(const VPart& v, int stage) const {
  const int first = channel_part() * (kChannels / 16);
  SPart part;
  for (auto& block : part) block.zero();
  mma_ABt<kChannels>(part, TileQ{shared.q[stage]}, 0, TileK{shared.k}, key_block(), 0, first);
  put_part(part, shared.s_parts);
  for (auto& block : part) block.zero();
  const TileQ do_{shared.do_[stage]};
  const uint32_t at = TileQ::move(TileQ::lane_down(), 0, first);
#pragma unroll
  for (int k_step = 0; k_step < kChannels / 16; ++k_step) {
#pragma unroll
    for (int m = 0; m < kQueries / 16; ++m) {
      uint32_t rows[4];
      ptx::ldmatrix(rows, do_.step(at, m, k_step));
#pragma unroll
      for (int half = 0; half < 2; ++half) ptx::mma_m16n8k16<T>(&part[m].x[4 * half], rows, &v.x[k_step][2 * half]);
    }
  }
  put_part(part, shared.dp_parts);
}

// Writes p and ds of the numbers of s and dp that this warp finds the sums of.
template <class Kind>
__device__ void Backward<Kind>::find_p_and_ds(const Step& step, int stage) const {
  TileS s, dp;
  add_parts(s, shared.s_parts), add_parts(dp, shared.dp_parts);
  [[maybe_unused]] Kept kept;
  if constexpr (kGeneral) find_kept(step, kept), drop_from(dp, kept), add_logit_terms(s, dp, step, stage);
  take_p(s, stage);
  hide(s, step.query);
  take_ds(s, dp, stage);
  if constexpr (kGeneral) drop_from(s, kept);
  store(s, shared.p[0]), store(dp, shared.ds[0]);
}

// The iterations of one bin of the queries. Where q and do have one stage, the next do is loaded beside dk and dq, and
// the next q beside dq.
template <class Kind>
__device__ void Backward<Kind>::compute_wide(const VPart& v, TileDk& dk, TileDk& dv) {
  static_assert(kStages == kDoStages && kBuffers == 1 && PartS::kBlocks == 1 && PartS::kColumns == 16 &&
                Operands::kReadsV && !kMasked);
  const TileK k{shared.k};
  const TileP p{shared.p[0]}, ds{shared.ds[0]};
  MBlock at = first_tile();  // of the next iteration that is loaded
  if (shared.iterations) {
    const Step step = next_step(at, 0);
    load_q(step, 0), load_do(step, 0), load_mask(step, true);
  }
  ptx::cp_async_commit();
  for (int n = 0; n < shared.iterations; ++n) {
    const int stage = n % kStages;
    const TileQ q{shared.q[stage]}, do_{shared.do_[stage]};
    ptx::cp_async_wait<0>();
    __syncthreads();  // q, do and a mask's tile have arrived, and ds has been read
    const bool more = n + 1 < shared.iterations;
    if (kStages > 1 && more) {
      const Step next = next_step(at, n + 1);
      load_q(next, (n + 1) % kStages), load_do(next, (n + 1) % kStages);
    }
    multiply_parts(v, stage);
    __syncthreads();  // the parts are written
    const Step& step = shared.steps[n % kSteps];
    if (warp < kSWarps) find_p_and_ds(step, stage);
    __syncthreads();  // p and ds are written
    if (kStages > 1 && more) load_mask(shared.steps[(n + 1) % kSteps], true);
    // opaque() stops the compiler from keeping addresses in registers throughout the loop.
    const int warp = ptx::opaque(this->warp);
    mma_AtB(dv, p, PartK::row_block(warp), do_, PartK::column_block(warp), [](int) {});
    if (kStages == 1) {
      __syncthreads();  // do has been read
      if (more) {
        const Step next = next_step(at, n + 1);
        load_do(next, 0), load_mask(next, true);
      }
    }
    mma_AtB(dk, ds, PartK::row_block(warp), q, PartK::column_block(warp), [](int) {});
    if (kStages == 1) {
      __syncthreads();  // q has been read
      if (more) load_q(shared.steps[(n + 1) % kSteps], 0);
    }
    ptx::cp_async_commit();
    for (int half = 0; half < (C::kDqHalves ? 2 : 1); ++half) {
      TileDq dq;
      for (auto& block : dq) block.zero();
      mma_AB<kKeys>(dq, ds, PartDq::row_block(warp), k, PartDq::column_block(warp) + half * (kDqColumns / 16));
      add(dq, step, half);
    }
  }
}

}  // namespace octet::cuda::sm80
