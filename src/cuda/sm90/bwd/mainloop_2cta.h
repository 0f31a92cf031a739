// The mainloops of the 2-CTA backward pass: one warpgroup computes p and ds, two accumulate dk, dv and dq.
#pragma once
#include "cuda/sm90/bwd/backward_2cta.h"

namespace octet::cuda::sm90 {

// Puts p or ds into the shared memory of both thread blocks.
template <class T, int Dim, Sums sums, Parts parts>
template <int Stages>
__device__ inline void Backward2Cta<T, Dim, sums, parts>::put(const Operand<T, kQueries>& x,
                                                              unsigned char (&tiles)[Stages][kBlocks][TileP::kBytes],
                                                              Pipeline<Stages>& pipe, unsigned n) {
  const int stage = n % Stages, me = rank();  // opaque() below keeps the rank out of registers between iterations
  unsigned char* const tile = tiles[stage][ptx::opaque(me)];
  pipe.empty[stage].wait_for_cluster(n / Stages % 2 ^ 1);
  store(x, TileP{tile}, 0);
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    constexpr uint32_t kBytes = TileP::kBytes / kWarps;  // this warp's rows
    unsigned char* const mine = tile + threadIdx.x % kWarpgroup / 32 * kBytes;
    pipe.full[stage].arrive_expecting(kBytes);  // expects the bytes of the peer's put
    ptx::copy_to(ptx::at_rank(mine, me ^ 1), mine, kBytes, ptx::at_rank(&pipe.full[stage], me ^ 1));
  }
}

// Warpgroup 1: computes p and ds of 64 keys.
template <class T, int Dim, Sums sums, Parts parts>
__device__ inline void Backward2Cta<T, Dim, sums, parts>::compute_p_ds() {
  unsigned n = 0;  // iterations of all blocks so far, which give the stage and phase of each pipeline
  const int group = a.heads / a.kv_heads;
  const TileK k{shared.k}, v{shared.v};
  const int me = rank(), local = me * kColumns, remote = (me ^ 1) * kColumns;
  for (unsigned tile_index = 0;; ++tile_index) {
    shared.k_pipe.full[0].wait(tile_index % 2);
    const KeyBlockInfo& w = shared.key_block[tile_index % Shared::kTileSlots];
    if (!w.valid()) break;
    const Exponents& e = scheduler.exponents(w);
    const float scale_log2e = a.scale * 1.44269504f * exp2f(static_cast<float>(-e.q - e.k));
    const float product_scale = exp2f(static_cast<float>(e.product));
    const int iterations = group * w.tiles.count();
    const UnmaskedIterations unmasked(a, w, w.first_key + me * kKeys, kKeys, kQueries, group);
    shared.v_pipe.full[0].wait(tile_index % 2);
    for (int left = iterations; left; --left, ++n) {
      const int stage = n % kStages;
      const uint32_t phase = n / kStages % 2;
      const Rows& rows = shared.rows[stage];
      Accumulator<kQueries> s, dp;
      Operand<T, kQueries> x;
      // Wait for q and do; issue s = k q^T and dp = v do^T, each as a remote and a local half of the channels.
      shared.q_remote_pipe.full[0].wait(n % 2);
      shared.q_pipe.full[stage].wait(phase);
      ptx::wgmma_fence();
      mma_ABt(s, columns_of<kChannels>(k, remote), 0, Half{shared.q_remote}, false);
      mma_ABt(s, columns_of<kChannels>(k, local), 0, Half{shared.q_local[stage]}, true);
      ptx::wgmma_commit();
      shared.do_remote_pipe.full[0].wait(n % 2);
      shared.do_pipe.full[stage].wait(phase);
      ptx::wgmma_fence();
      mma_ABt(dp, columns_of<kChannels>(v, remote), 0, Half{shared.do_remote}, false);
      mma_ABt(dp, columns_of<kChannels>(v, local), 0, Half{shared.do_local[stage]}, true);
      ptx::wgmma_commit();
      // p = exp(scale s - lse); release the remote half of q; put p.
      ColumnValues<kQueries> columns(rows.lse);
      ptx::wgmma_wait<1>();
      ptx::fence_operand(s.x);
      arrive_as_warp(shared.q_remote_pipe.empty[0]);
#pragma unroll
      for (int i = 0; i < kQueries / 2; ++i) s.x[i] = ptx::exp2(__fmaf_rn(s.x[i], scale_log2e, -columns.of(i)));
      if (!unmasked.has(left)) mask_P(a, s, w, w.first_key + rank() * kKeys, rows.first);
      convert(s, x);
      put(x, shared.p, shared.p_pipe, n);
      // ds = p (dp - delta); release the remote half of do, v after the last iteration, and the rows; put ds.
      columns.read(rows.delta);
      ptx::wgmma_wait<0>();
      ptx::fence_operand(dp.x);
      arrive_as_warp(shared.do_remote_pipe.empty[0]);
      if (left == 1) arrive_as_warp(shared.v_pipe.empty[0]);
      shared.rows_empty[stage].arrive();
#pragma unroll
      for (int i = 0; i < kQueries / 2; ++i) dp.x[i] = s.x[i] * __fmaf_rn(dp.x[i], product_scale, -columns.of(i));
      convert(dp, x);
      put(x, shared.ds, shared.ds_pipe, n);
    }
    if (!iterations) arrive_as_warp(shared.v_pipe.empty[0]);
    shared.k_pipe.empty[0].arrive();
  }
}

// Warpgroups 2 and 3: accumulate dv and dk of 64 keys, and compute dq of 64 channels.
template <class T, int Dim, Sums sums, Parts parts>
__device__ inline void Backward2Cta<T, Dim, sums, parts>::accumulate(int half) {
  unsigned n = 0;
  const int group = a.heads / a.kv_heads, channel = rank() * kChannels;
  const auto k = columns_of<kDqColumns>(TileK{shared.k}, rank() * kColumns + half * kDqColumns);
  const auto remote_k = columns_of<kDqColumns>(Half{shared.remote_k}, half * kDqColumns);
  for (unsigned tile_index = 0;; ++tile_index) {
    shared.k_pipe.full[0].wait(tile_index % 2);
    const KeyBlockInfo& w = shared.key_block[tile_index % Shared::kTileSlots];
    if (!w.valid()) break;
    const Exponents& e = scheduler.exponents(w);
    const int iterations = group * w.tiles.count();
    // opaque() makes these known before the first product: loads after the last one would be waited for.
    const int dv_exponent = ptx::opaque(-a.p_exponent - e.do_);
    const int dk_exponent = ptx::opaque(dv_exponent - e.product - e.v - e.q);
    const float dq_scale = parts == Parts::first ? 1.f : ptx::opaque(exp2f(static_cast<float>(e.dq)));
    // Not loaded in each iteration, just before it is used.
    const float dq_sums_scale = sums == Sums::integers ? ptx::opaque(e.dq_sums_scale) : 0.f;
    Accumulator<kChannels> dk, dv;
    dk.zero(), dv.zero();
    for (int left = iterations; left; --left, ++n) {
      const int stage = n % kStages, p_stage = n % kPStages, ds_stage = n % kDsStages;
      const uint32_t phase = n / kStages % 2;
      auto& ds = shared.ds[ds_stage];
      Accumulator<kDqColumns> dq;
      // Wait for do and p; issue dv += p do.
      shared.do_pipe.full[stage].wait(phase);
      shared.p_pipe.full[p_stage].wait(n / kPStages % 2);
      ptx::wgmma_fence();
      mma_AB(dv, TileP{shared.p[p_stage][half]}, Half{shared.do_local[stage]});
      ptx::wgmma_commit();
      // Wait for q and ds; issue dq = ds^T k over the keys of both thread blocks, then dk += ds q.
      shared.q_pipe.full[stage].wait(phase);
      const Target target = target_of<sums>(shared.rows[stage], 0, dq_sums_scale);
      shared.rows_empty[stage].arrive();
      shared.ds_pipe.full[ds_stage].wait(n / kDsStages % 2);
      ptx::wgmma_fence();
      mma_AtB(dq, TileP{ds[rank()]}, 0, k, 0);
      mma_AtB(dq, TileP{ds[peer()]}, 0, remote_k, 0, true);
      ptx::wgmma_commit();
      ptx::wgmma_fence();
      mma_AB(dk, TileP{ds[half]}, Half{shared.q_local[stage]});
      ptx::wgmma_commit();
      // Release do and p.
      ptx::wgmma_wait<2>();
      ptx::fence_operand(dv.x);
      arrive_as_warp(shared.do_pipe.empty[stage]);
      release(shared.p_pipe.empty[p_stage]);
      // Add dq to its sums.
      ptx::wgmma_wait<1>();
      ptx::fence_operand(dq.x);
      if constexpr (parts == Parts::further && sums == Sums::floats) dq.scale(dq_scale);
      const int64_t start = ((static_cast<int64_t>(target.tile) * kBlocks + rank()) * 2 + half) * kDqNumbers;
      // The second warpgroup's part ends in padding where the head dim is less than that of tiles.
      const int columns = Dim == kTileDim || half == 0 ? kDqColumns : kChannels - kDqColumns;
      add_to_sums<Rows, sums, kSumsAtOnce<kTileDim, sums>>(a, target, start, 0, dq, columns, threadIdx.x % kWarpgroup);
      // Release ds and q.
      ptx::wgmma_wait<0>();
      ptx::fence_operand(dk.x);
      release(shared.ds_pipe.empty[ds_stage]);
      arrive_as_warp(shared.q_pipe.empty[stage]);
    }
    shared.k_pipe.empty[0].arrive();
    const int key = w.first_key + half * kKeys;
    scale_keys(dv, 1.f, dv_exponent);
    write_keys<parts>(a.dv, w, key, channel, dv, a.dim_v);
    scale_keys(dk, a.scale, dk_exponent);
    write_keys<parts>(a.dk, w, key, channel, dk, a.dim);
  }
}

}  // namespace octet::cuda::sm90
