// The mainloops of the 2-CTA backward pass: one warpgroup computes p and ds, two accumulate dk, dv and dq.
#pragma once
#include "cuda/sm90/bwd/backward_2cta.h"

namespace octet::cuda::sm90 {

// Puts p or ds into the shared memory of both thread blocks.
template <class T, class Dims, Sums sums, Bins bins>
template <int Stages>
__device__ inline void Backward2Cta<T, Dims, sums, bins>::put(const Operand<T, kQueries>& x,
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
    unsigned char* const rows = tile + threadIdx.x % kWarpgroup / 32 * kBytes;
    pipe.full[stage].arrive_expecting(kBytes);  // expects the bytes of the peer's put
    ptx::copy_to(ptx::at_rank(rows, me ^ 1), rows, kBytes, ptx::at_rank(&pipe.full[stage], me ^ 1));
  }
}

// Warpgroup 1: computes p and ds of 64 keys.
template <class T, class Dims, Sums sums, Bins bins>
__device__ inline void Backward2Cta<T, Dims, sums, bins>::compute_p_ds() {
  unsigned n = 0;  // iterations of all blocks so far, which give the stage and phase of each pipeline
  const int group = a.heads / a.kv_heads;
  const TileK k{shared.k};
  const TileV v{shared.v};
  constexpr int kOthers = Dim - kRemoteColumns, kOthersV = DimV - kRemoteColumns;
  const int me = rank(), local = kLocalFirst ? 0 : me * kLocalColumns,
            remote = kLocalFirst ? kLocalColumns : (me ^ 1) * kLocalColumns,
            remote_v = kLocalFirst ? kLocalColumnsV : remote;
  for (unsigned tile_index = 0;; ++tile_index) {
    shared.k_pipe.full[0].wait(tile_index % 2);
    const KeyBlockInfo& w = shared.key_block[tile_index % Shared::kTileSlots];
    if (!w.valid()) break;
    const Exponents& e = scheduler.exponents(w);
    const float scale_log2e = a.scale * 1.44269504f * exp2f(static_cast<float>(-e.q - e.k));
    const float product_scale = exp2f(static_cast<float>(e.product));
    const int iterations = group * w.tiles.count();
    const UnmaskedIterations unmasked(a, w, w.first_key + me * kKeys, kKeys, kQueries, group);
    // Waits for q; issues s = k q^T.
    const auto issue_s = [&](Accumulator<kQueries>& s, unsigned n) {
      const int q_stage = n % kQStages, remote_stage = n % kRemoteStages;
      shared.q_remote_pipe.full[remote_stage].wait(n / kRemoteStages % 2);
      shared.q_pipe.full[q_stage].wait(n / kQStages % 2);
      ptx::wgmma_fence();
      mma_ABt(s, columns_of<kRemoteColumns>(k, remote), 0, Remote{shared.q_remote[remote_stage]}, false);
      mma_ABt(s, columns_of<kOthers>(k, local), 0, columns_of<kOthers>(Local{shared.q_local[q_stage]}, 0), true);
      ptx::wgmma_commit();
    };
    // Waits for s, where dp may be in flight unless s is ahead; releases the remote columns of q.
    const auto finish_s = [&](Accumulator<kQueries>& s, unsigned n) {
      ptx::wgmma_wait<kAhead ? 0 : 1>();
      ptx::fence_operand(s.x);
      arrive_as_warp(shared.q_remote_pipe.empty[n % kRemoteStages]);
    };
    // Waits for do; issues dp = v do^T.
    const auto issue_dp = [&](Accumulator<kQueries>& dp) {
      const int do_stage = n % kDoStages, remote_stage = n % kRemoteStages;
      shared.do_remote_pipe.full[remote_stage].wait(n / kRemoteStages % 2);
      shared.do_pipe.full[do_stage].wait(n / kDoStages % 2);
      ptx::wgmma_fence();
      mma_ABt(dp, columns_of<kRemoteColumns>(v, remote_v), 0, Remote{shared.do_remote[remote_stage]}, false);
      mma_ABt(dp, columns_of<kOthersV>(v, local), 0, columns_of<kOthersV>(LocalDo{shared.do_local[do_stage]}, 0), true);
      ptx::wgmma_commit();
    };
    // p = exp(scale s - lse), in the place of s; puts p.
    const auto put_p = [&](Accumulator<kQueries>& s, const ColumnValues<kQueries>& lse, int left) {
#pragma unroll
      for (int i = 0; i < kQueries / 2; ++i) s.x[i] = ptx::exp2(__fmaf_rn(s.x[i], scale_log2e, -lse.of(i)));
      if (!unmasked.has(left)) mask_P(a, s, w, w.first_key + rank() * kKeys, shared.rows[n % kQStages].first);
      Operand<T, kQueries> x;
      convert(s, x);
      put(x, shared.p, shared.p_pipe, n);
    };
    // Waits for dp; releases the remote columns of do, and v after the last iteration.
    const auto finish_dp = [&](Accumulator<kQueries>& dp, int left) {
      ptx::wgmma_wait<0>();
      ptx::fence_operand(dp.x);
      arrive_as_warp(shared.do_remote_pipe.empty[n % kRemoteStages]);
      if (left == 1) arrive_as_warp(shared.v_pipe.empty[0]);
    };
    // ds = p (dp - delta), in the place of dp; releases the rows and puts ds.
    const auto put_ds = [&](const Accumulator<kQueries>& p, Accumulator<kQueries>& dp,
                            const ColumnValues<kQueries>& delta) {
      shared.rows_empty[n % kQStages].arrive();
#pragma unroll
      for (int i = 0; i < kQueries / 2; ++i) dp.x[i] = p.x[i] * __fmaf_rn(dp.x[i], product_scale, -delta.of(i));
      Operand<T, kQueries> x;
      convert(dp, x);
      put(x, shared.ds, shared.ds_pipe, n);
    };
    shared.v_pipe.full[0].wait(tile_index % 2);
    if constexpr (kAhead) {
      Accumulator<kQueries> s;
      if (iterations) issue_s(s, n), finish_s(s, n);
      const auto compute = [&](auto is_last, int left) {
        constexpr bool kIsLast = decltype(is_last)::value;
        Accumulator<kQueries> dp, next_s;
        issue_dp(dp);
        ColumnValues<kQueries> columns(shared.rows[n % kQStages].lse);
        put_p(s, columns, left);
        columns.read(shared.rows[n % kQStages].delta);
        finish_dp(dp, left);
        if (!kIsLast) issue_s(next_s, n + 1);
        put_ds(s, dp, columns);
        if (!kIsLast) finish_s(next_s, n + 1), s = next_s;
        ++n;
      };
      for (int left = iterations; left > 1; --left) compute(std::false_type{}, left);
      if (iterations) compute(std::true_type{}, 1);
    } else {
      for (int left = iterations; left; --left, ++n) {
        Accumulator<kQueries> s, dp;
        issue_s(s, n);
        issue_dp(dp);
        ColumnValues<kQueries> columns(shared.rows[n % kQStages].lse);
        finish_s(s, n);
        put_p(s, columns, left);
        columns.read(shared.rows[n % kQStages].delta);
        finish_dp(dp, left);
        put_ds(s, dp, columns);
      }
    }
    if (!iterations) arrive_as_warp(shared.v_pipe.empty[0]);
    shared.k_pipe.empty[0].arrive();
  }
}

// Warpgroups 2 and 3: accumulate dv and dk of 64 keys, and compute dq of 64 channels.
template <class T, class Dims, Sums sums, Bins bins>
__device__ inline void Backward2Cta<T, Dims, sums, bins>::accumulate(int half) {
  unsigned n = 0;
  const int group = a.heads / a.kv_heads, channel = rank() * kChannels;
  const auto k = columns_of<kDqColumns>(TileK{shared.k}, local_column() + half * kDqColumns);
  const auto remote_k = columns_of<kDqColumns>(Local{shared.remote_k}, half * kDqColumns);
  // The column of the last panel at which this thread block's own channels begin there.
  const int rest_column = kHalves && !a.q && rank() ? kPanelColumns - kChannels % kPanelColumns : 0;
  for (unsigned tile_index = 0;; ++tile_index) {
    shared.k_pipe.full[0].wait(tile_index % 2);
    const KeyBlockInfo& w = shared.key_block[tile_index % Shared::kTileSlots];
    if (!w.valid()) break;
    const Exponents& e = scheduler.exponents(w);
    const int iterations = group * w.tiles.count();
    // opaque() makes these known before the first product: loads after the last one would be waited for.
    const int dv_exponent = ptx::opaque(-e.p - e.do_);
    const int dk_exponent = ptx::opaque(dv_exponent - e.product - e.v - e.q);
    const float dq_scale = bins == Bins::first ? 1.f : ptx::opaque(exp2f(static_cast<float>(e.dq)));
    // Not loaded in each iteration, just before it is used.
    const float dq_sums_scale = sums == Sums::integers ? ptx::opaque(e.dq_sums_scale) : 0.f;
    KeySums<kChannels, kHalves> dk;
    KeySums<kChannelsV, kHalves && kChannelsV == kChannels> dv;
    dk.zero(), dv.zero();
    for (int left = iterations; left; --left, ++n) {
      const int q_stage = n % kQStages, do_stage = n % kDoStages, p_stage = n % kPStages, ds_stage = n % kDsStages;
      auto& ds = shared.ds[ds_stage];
      Accumulator<kDqColumns> dq;
      // Wait for do and p; issue dv += p do.
      shared.do_pipe.full[do_stage].wait(n / kDoStages % 2);
      shared.p_pipe.full[p_stage].wait(n / kPStages % 2);
      ptx::wgmma_fence();
      dv.add(TileP{shared.p[p_stage][half]}, LocalDo{shared.do_local[do_stage]}, rest_column);
      ptx::wgmma_commit();
      // Wait for q and ds; issue dq = ds^T k over the keys of both thread blocks, then dk += ds q.
      shared.q_pipe.full[q_stage].wait(n / kQStages % 2);
      const Target target = target_of<sums>(shared.rows[q_stage], 0, dq_sums_scale);
      shared.rows_empty[q_stage].arrive();
      shared.ds_pipe.full[ds_stage].wait(n / kDsStages % 2);
      ptx::wgmma_fence();
      mma_AtB(dq, TileP{ds[rank()]}, 0, k, 0);
      mma_AtB(dq, TileP{ds[peer()]}, 0, remote_k, 0, true);
      ptx::wgmma_commit();
      ptx::wgmma_fence();
      dk.add(TileP{ds[half]}, Local{shared.q_local[q_stage]}, rest_column);
      ptx::wgmma_commit();
      // Release do and p.
      ptx::wgmma_wait<2>();
      dv.fence();
      arrive_as_warp(shared.do_pipe.empty[do_stage]);
      release(shared.p_pipe.empty[p_stage]);
      // Add dq to its sums.
      ptx::wgmma_wait<1>();
      ptx::fence_operand(dq.x);
      if constexpr (bins == Bins::further && sums == Sums::floats) dq.scale(dq_scale);
      const int64_t start = ((static_cast<int64_t>(target.tile) * kBlocks + rank()) * 2 + half) * kDqNumbers;
      // Up to d = 192, the second warpgroup's part has columns that are not its own.
      const int from = half == 0 ? 0 : rest_column,
                columns = Dim == kTileDim || half == 0 ? kDqColumns : from + kChannels - kDqColumns;
      add_to_sums<Rows, sums, kSumsAtOnce<kTileDim, sums>>(a, target, start, 0, dq, columns, threadIdx.x % kWarpgroup,
                                                           from);
      // Release ds and q.
      ptx::wgmma_wait<0>();
      dk.fence();
      release(shared.ds_pipe.empty[ds_stage]);
      arrive_as_warp(shared.q_pipe.empty[q_stage]);
    }
    shared.k_pipe.empty[0].arrive();
    const int key = w.first_key + half * kKeys;
    // Fragments are stored by 32 columns; beyond 80 lie channels of the peer.
    constexpr bool kOverlaps = kChannels % 32 != 0, kOverlapsV = kChannelsV % 32 != 0;
    const int channel_v = channel / kChannels * kChannelsV;
    dv.parts(rest_column ? channel_v + kChannelsV - kPanelColumns : channel_v,
             rest_column ? channel_v : channel_v + kPanelColumns, [&](auto& x, int first) {
               scale_keys(x, 1.f, dv_exponent);
               write_keys<bins>(a.dv, w, key, first, x, kOverlapsV ? min(a.dim_v, first + kChannelsV) : a.dim_v);
             });
    dk.parts(rest_column ? channel + kChannels - kPanelColumns : channel,
             rest_column ? channel : channel + kPanelColumns, [&](auto& x, int first) {
               scale_keys(x, a.scale, dk_exponent);
               write_keys<bins>(a.dk, w, key, first, x, kOverlaps ? min(a.dim, first + kChannels) : a.dim);
             });
  }
}

}  // namespace octet::cuda::sm90
