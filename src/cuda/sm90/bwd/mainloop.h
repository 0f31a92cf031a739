// The mainloop of the backward pass, by one consumer warpgroup. sm90/bwd/backward.h has the algorithm.
#pragma once
#include "cuda/sm90/bwd/backward.h"

namespace octet::cuda::sm90 {

// Adds this warpgroup's part of dq to the sums.
template <class T, int Dim, Sums sums, Parts parts>
__device__ inline void Backward<T, Dim, sums, parts>::add(const Target& target, int warpgroup,
                                                          const Accumulator<kDqColumns>& x, int thread) const {
  const int64_t start = (static_cast<int64_t>(target.tile) * kWarpgroups + warpgroup) * kDqNumbers;
  // The last warpgroup's part ends in padding where the head dim is less than that of tiles.
  const int columns =
      Dim == kTileDim || warpgroup < kWarpgroups - 1 ? kDqColumns : Dim - (kWarpgroups - 1) * kDqColumns;
  add_to_sums<Rows, sums, kSumsAtOnce<kTileDim, sums>>(a, target, start, dq_row(warpgroup), x, columns, thread);
}

// Computes all blocks of keys, as consumer warpgroup `warpgroup`.
template <class T, int Dim, Sums sums, Parts parts>
__device__ inline void Backward<T, Dim, sums, parts>::consume(int warpgroup) {
  unsigned n = 0;  // iterations of all blocks so far, which give the stage and phase of each pipeline
  if (warpgroup == 1) ping_pong_arrive(warpgroup);  // warpgroup 0 goes first
  for (unsigned tile_index = 0;; ++tile_index) {
    const int slot = tile_index % Shared::kTileSlots, key_stage = tile_index % kKeyStages;
    const uint32_t key_phase = tile_index / kKeyStages % 2;
    shared.tile_pipe.full[slot].wait(tile_index / Shared::kTileSlots % 2);
    const KeyBlockInfo& w = shared.key_block[slot];
    if (!w.valid()) break;
    shared.k_pipe.full[key_stage].wait(key_phase);
    shared.v_pipe.full[key_stage].wait(key_phase);
    const Exponents& e = scheduler.exponents(w);
    if (sums == Sums::integers || (parts == Parts::first && w.exponents.k == e.k && w.exponents.ds == 0))
      compute<true>(warpgroup, w, e, key_stage, n);
    else
      compute<false>(warpgroup, w, e, key_stage, n);
    shared.tile_pipe.empty[slot].arrive();
  }
}

// The iterations of a block. kUsual is true where ds and dq have the exponents of the head's first part.
template <class T, int Dim, Sums sums, Parts parts>
template <bool kUsual>
__device__ inline void Backward<T, Dim, sums, parts>::compute(int warpgroup, const KeyBlockInfo& w, const Exponents& e,
                                                              int key_stage, unsigned& n) {
  const int group = a.heads / a.kv_heads, my_keys = warpgroup * kWarpgroupRows;
  const TileK k{shared.k[key_stage]}, v{shared.v[key_stage]};
  const auto k_for_dq = columns_of<kDqColumns>(k, kDqByQueries ? 0 : warpgroup * kDqColumns);
  const KeyExponents mine = w.exponents;
  const float scale_log2e = a.scale * 1.44269504f * exp2f(static_cast<float>(-e.q - mine.k));
  const float product_scale = exp2f(static_cast<float>(e.product + e.v - mine.v));
  const int iterations = group * w.tiles.count();
  const UnmaskedIterations unmasked(a, w, w.first_key, kKeys, kQueries, group);
  const float ds_scale = exp2f(static_cast<float>(-mine.ds)),
              dq_scale = exp2f(static_cast<float>(mine.ds + e.k - mine.k + (parts == Parts::first ? 0 : e.dq)));
  // opaque() keeps these in registers: else each iteration would compute them again between its products.
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x % kWarpgroup)), ds_offset = ptx::opaque(store_offset());
  // Not loaded in each iteration, just before it is used.
  const float dq_sums_scale = sums == Sums::integers ? ptx::opaque(e.dq_sums_scale) : 0.f;
  Target target{};  // of the iteration before
  Accumulator<Dim> dk, dv;
  dk.zero(), dv.zero();
  // Issues dq of the iteration before.
  const auto issue_dq = [&](Accumulator<kDqColumns>& dq) {
    ptx::wgmma_fence();
    mma_AtB(dq, TileDs{shared.ds[(n - 1) % kDsStages]}, kDqByQueries ? warpgroup : 0, k_for_dq, 0);
    ptx::wgmma_commit();
  };
  const auto add_dq = [&](Accumulator<kDqColumns>& dq) {
    arrive_as_warp(shared.ds_pipe.empty[(n - 1) % kDsStages]);
    if (!kUsual) dq.scale(dq_scale);
    add(target, warpgroup, dq, thread);
  };
  const auto wait_q = [&](unsigned step) { shared.q_pipe.full[step % kStages].wait(step / kStages % 2); };
  if (kAwaitsNext && iterations) wait_q(n);
  for (int left = iterations; left; --left, ++n) {
    const int stage = n % kStages, do_stage = n % kDoStages, ds_stage = n % kDsStages;
    const TileQ q{shared.q[stage]}, do_{shared.do_[do_stage]};
    const Rows& rows = shared.rows[stage];
    Accumulator<kQueries> s, dp;
    Operand<T, kQueries> p, ds;
    // Wait for q and do; issue s = k q^T and dp = v do^T.
    if (!kAwaitsNext) wait_q(n);
    ptx::wgmma_fence();
    mma_ABt(s, k, my_keys, q, false);
    ptx::wgmma_commit();
    shared.do_pipe.full[do_stage].wait(n / kDoStages % 2);
    ptx::wgmma_fence();
    mma_ABt(dp, v, my_keys, do_, false);
    ptx::wgmma_commit();
    if (left < iterations) ping_pong_arrive(warpgroup);  // ends the turn that began in the iteration before
    // p = exp(scale s - lse).
    ptx::wgmma_wait<1>();
    ptx::fence_operand(s.x);
    ColumnValues<kQueries> columns(rows.lse);
#pragma unroll
    for (int i = 0; i < kQueries / 2; ++i) s.x[i] = ptx::exp2(__fmaf_rn(s.x[i], scale_log2e, -columns.of(i)));
    if (!unmasked.has(left)) mask_P(a, s, w, w.first_key + my_keys, rows.first);
    if constexpr (kEarlyP) convert(s, p);
    // ds = p (dp - delta); release v after the last iteration, and the rows.
    ptx::wgmma_wait<0>();
    ptx::fence_operand(dp.x);
    if (left == 1) arrive_as_warp(shared.v_pipe.empty[key_stage]);
    columns.read(rows.delta);
    const Target next_target = target_of<sums>(rows, dq_row(warpgroup), dq_sums_scale);
    shared.rows_empty[stage].arrive();
#pragma unroll
    for (int i = 0; i < kQueries / 2; ++i) dp.x[i] = s.x[i] * __fmaf_rn(dp.x[i], product_scale, -columns.of(i));
    if (!kUsual) dp.scale(ds_scale);
    if constexpr (!kEarlyP) convert(s, p);
    convert(dp, ds);
    // Store ds for dq of the next iteration.
    shared.ds_pipe.empty[ds_stage].wait(n / kDsStages % 2 ^ 1);
    store(ds, TileDs{shared.ds[ds_stage]}, my_keys, ds_offset);
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
    arrive_as_warp(shared.ds_pipe.full[ds_stage]);
    // Ping-pong: issue dv += p do, dq of the iteration before, dk += ds q.
    ping_pong_wait(warpgroup);
    ptx::wgmma_fence();
    mma_AB(dv, p, do_);
    ptx::wgmma_commit();
    // The first iteration of a block has no dq to compute; the product is issued and its result ignored.
    Accumulator<kDqColumns> dq;
    if (left < iterations) shared.ds_pipe.full[(n - 1) % kDsStages].wait((n - 1) / kDsStages % 2);
    issue_dq(dq);
    ptx::wgmma_fence();
    mma_AB(dk, ds, q);
    ptx::wgmma_commit();
    // Release do; add dq to its sums.
    ptx::wgmma_wait<1>();
    ptx::fence_operand(dv.x);
    arrive_as_warp(shared.do_pipe.empty[do_stage]);
    ptx::fence_operand(dq.x);
    if (kAwaitsNext && left > 1) wait_q(n + 1);
    if (left < iterations) add_dq(dq);
    target = next_target;
    // Release q.
    ptx::wgmma_wait<0>();
    ptx::fence_operand(dk.x);
    arrive_as_warp(shared.q_pipe.empty[stage]);
  }
  // dq of the last iteration; release k.
  if (iterations) {
    ping_pong_arrive(warpgroup);
    Accumulator<kDqColumns> dq;
    shared.ds_pipe.full[(n - 1) % kDsStages].wait((n - 1) / kDsStages % 2);
    issue_dq(dq);
    ptx::wgmma_wait<0>();
    ptx::fence_operand(dq.x);
    shared.k_pipe.empty[key_stage].arrive();
    add_dq(dq);
  } else {
    shared.k_pipe.empty[key_stage].arrive(), arrive_as_warp(shared.v_pipe.empty[key_stage]);
  }
  const int key = w.first_key + my_keys;
  write_keys<parts>(a.dv, w, key, 0, dv, 1.f, -a.p_exponent - e.do_, a.dim_v);
  write_keys<parts>(a.dk, w, key, 0, dk, a.scale, (kUsual ? 0 : mine.ds) - a.p_exponent - e.product - e.do_ - e.v - e.q,
                    a.dim);
}

}  // namespace octet::cuda::sm90
