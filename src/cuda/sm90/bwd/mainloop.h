// The mainloop of the backward pass, by one consumer warpgroup. sm90/bwd/backward.h has the algorithm.
#pragma once
#include "cuda/sm90/bwd/backward.h"

namespace octet::cuda::sm90 {

// Adds this warpgroup's part of dq to the sums.
template <class T, int Dim, Sums sums, Bins bins, Extra extra>
__device__ inline void Backward<T, Dim, sums, bins, extra>::add(const Target& target, int warpgroup,
                                                                const Accumulator<kDqColumns>& x, int thread) const {
  const int64_t start = (static_cast<int64_t>(target.tile) * kWarpgroups + warpgroup) * kDqNumbers;
  // The last warpgroup's part ends in padding where the head dim is less than that of tiles.
  const int columns =
      Dim == kTileDim || warpgroup < kWarpgroups - 1 ? kDqColumns : Dim - (kWarpgroups - 1) * kDqColumns;
  add_to_sums<Rows, sums, kSumsAtOnce<kTileDim, sums>>(a, target, start, dq_row(warpgroup), x, columns, thread);
}

// Brings the warpgroup's rows of dk and dv to shared memory, from where TMA writes them while the next block is
// computed. Each warp sends its own rows.
template <class T, int Dim, Sums sums, Bins bins, Extra extra>
template <class Type>
__device__ inline void Backward<T, Dim, sums, bins, extra>::send_keys(int warpgroup, const KeyBlockInfo& w,
                                                                      const Accumulator<Dim>& dk,
                                                                      const Accumulator<Dim>& dv, int key_stage,
                                                                      int ds_stage, int offset) const {
  using Tile = TileSent<Type>;
  const auto tile = [&](unsigned char* k_or_v, int half) -> Tile {
    return {kSendsFromDs ? shared.ds[ds_stage] + warpgroup * TileDs::kPanelBytes + half * Tile::kBytes
                         : k_or_v + warpgroup * TileK::kPanelBytes};
  };
  const Tile dk_tile = tile(shared.k[key_stage], 0), dv_tile = tile(shared.v[key_stage], 1);
  Operand<Type, Dim> words;
  convert(dk, words);
  ptx::barrier_sync(kReadBarrier + warpgroup, kWarpgroup);  // the products of all four warps are complete
  store(words, dk_tile, 0, offset);
  convert(dv, words);
  store(words, dv_tile, 0, offset);
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
  __syncwarp();
  if (threadIdx.x % 32) return;
  const int first = threadIdx.x % kWarpgroup / 32 * kSentRows;
  const int row = w.k.first + w.first_key + warpgroup * kWarpgroupRows + first;
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    const int at = panel * Tile::kPanelBytes + first * kPanelRowBytes;
    ptx::bulk_store(a.dk_rows, panel * kPanelColumns, row, w.kv_head, w.batch, dk_tile.address() + at);
    ptx::bulk_store(a.dv_rows, panel * kPanelColumns, row, w.kv_head, w.batch, dv_tile.address() + at);
  }
  ptx::bulk_store_commit();
}

// Releases the shared memory from which this warp's rows of dk and dv were sent.
template <class T, int Dim, Sums sums, Bins bins, Extra extra>
__device__ inline void Backward<T, Dim, sums, bins, extra>::release_sent(int key_stage, int ds_stage) {
  if (threadIdx.x % 32 == 0) ptx::bulk_store_wait_read();
  if constexpr (kSendsFromDs) {
    arrive_as_warp(shared.ds_pipe.empty[ds_stage]);
  } else {
    __syncwarp();
    shared.k_pipe.empty[key_stage].arrive(), arrive_as_warp(shared.v_pipe.empty[key_stage]);
  }
}

// Writes the warpgroup's rows of dk and dv of a block with `iterations` iterations, the last of which was number n - 1.
template <class T, int Dim, Sums sums, Bins bins, Extra extra>
__device__ inline void Backward<T, Dim, sums, bins, extra>::write(int warpgroup, const KeyBlockInfo& w,
                                                                  Accumulator<Dim>& dk, Accumulator<Dim>& dv,
                                                                  int key_stage, int iterations, unsigned n,
                                                                  int offset) const {
  const int key = w.first_key + warpgroup * kWarpgroupRows;
  if (bins == Bins::first && a.sends_keys && iterations && key + kWarpgroupRows <= w.k.tokens) {
    const auto send = [&]<class Type>(Type) {
      send_keys<Type>(warpgroup, w, dk, dv, key_stage, (n - 1) % kDsStages, offset);
    };
    std::is_same_v<T, Bf16> || a.dk.element == Element::bf16 ? send(Bf16{}) : send(F16{});
  } else {
    write_keys<bins>(a.dv, w, key, 0, dv, a.dim_v);
    write_keys<bins>(a.dk, w, key, 0, dk, a.dim);
  }
}

// Stores the warpgroup's rows of ds for dq of the next iteration.
template <class T, int Dim, Sums sums, Bins bins, Extra extra>
__device__ inline void Backward<T, Dim, sums, bins, extra>::put_ds(const Operand<T, kQueries>& ds, int warpgroup,
                                                                   unsigned n, int offset) {
  const int stage = n % kDsStages;
  shared.ds_pipe.empty[stage].wait(n / kDsStages % 2 ^ 1);
  store(ds, TileDs{shared.ds[stage]}, warpgroup * kWarpgroupRows, offset);
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
  arrive_as_warp(shared.ds_pipe.full[stage]);
}

// Passes by the first tile of queries, none of which sees the warpgroup's keys: stores a ds of 0, and takes the turn
// without products. Returns where dq of the tile goes.
template <class T, int Dim, Sums sums, Bins bins, Extra extra>
__device__ inline Target Backward<T, Dim, sums, bins, extra>::pass_first(int warpgroup, unsigned n, float dq_sums_scale,
                                                                         int offset) {
  const int stage = n % kStages;
  const Target target = target_of<sums>(shared.rows[stage], dq_row(warpgroup), dq_sums_scale);
  shared.rows_empty[stage].arrive();
  Operand<T, kQueries> ds{};
  put_ds(ds, warpgroup, n, offset);
  arrive_as_warp(shared.do_pipe.empty[n % kDoStages]), arrive_as_warp(shared.q_pipe.empty[stage]);
  ping_pong_wait(warpgroup);
  return target;
}

// Turns s into p = exp(scale s - lse), also where a query does not see a key. `key`: of the fragment's first row;
// `head`: of the group. With ALiBi and mask tensors lse is not in `columns` but read here, as there may be no registers
// for it. `n`: the iteration.
template <class T, int Dim, Sums sums, Bins bins, Extra extra>
template <bool kUsual>
__device__ inline void Backward<T, Dim, sums, bins, extra>::take_P(Accumulator<kQueries>& s, float factor,
                                                                   const ColumnValues<kQueries>& columns,
                                                                   const Rows& rows, const KeyBlockInfo& w, int key,
                                                                   int head, int warpgroup, unsigned n) const {
  if constexpr (kMasked)
    Mask::take_P(shared, s, factor, rows, warpgroup, n);
  else if constexpr (kAlibi)
    take_alibi_P<kUsual>(a, s, factor, slope_of(a.slopes, a, w, head), rows.lse, w, key, rows.first);
  else
#pragma unroll
    for (int i = 0; i < kQueries / 2; ++i) s.x[i] = ptx::exp2(__fmaf_rn(s.x[i], factor, -columns.of(i)));
}

// Computes all blocks of keys, as consumer warpgroup `warpgroup`.
template <class T, int Dim, Sums sums, Bins bins, Extra extra>
__device__ inline void Backward<T, Dim, sums, bins, extra>::consume(int warpgroup) {
  unsigned n = 0;     // iterations of all blocks so far, which give the stage and phase of each pipeline
  bool sent = false;  // dk and dv of the block before take shared memory, until the next block's first iteration
  if (warpgroup == 1) ping_pong_arrive(warpgroup);  // warpgroup 0 goes first
  for (unsigned tile_index = 0;; ++tile_index) {
    const int slot = tile_index % Shared::kTileSlots, key_stage = tile_index % kKeyStages;
    const uint32_t key_phase = tile_index / kKeyStages % 2;
    shared.tile_pipe.full[slot].wait(tile_index / Shared::kTileSlots % 2);
    const KeyBlockInfo& w = shared.key_block[slot];
    if (!w.valid()) break;
    shared.k_pipe.full[key_stage].wait(key_phase);
    shared.v_pipe.full[key_stage].wait(key_phase);
    const BlockFactors& f = shared.factors[slot];
    if (sums == Sums::integers || (bins == Bins::first && f.usual))
      compute<true>(warpgroup, w, f, key_stage, sent, n);
    else
      compute<false>(warpgroup, w, f, key_stage, sent, n);
    sent = f.iterations;
    shared.tile_pipe.empty[slot].arrive();
  }
  ptx::bulk_store_wait();
}

// The iterations of a block. kUsual is true where ds and dq have the exponents of the head's first bin, and ALiBi has
// gentle terms. `sent`: dk and dv of the block before still take shared memory.
template <class T, int Dim, Sums sums, Bins bins, Extra extra>
template <bool kUsual>
__device__ inline void Backward<T, Dim, sums, bins, extra>::compute(int warpgroup, const KeyBlockInfo& w,
                                                                    const BlockFactors& f, int key_stage, bool sent,
                                                                    unsigned& n) {
  const int first_row = warpgroup * kWarpgroupRows, iterations = f.iterations;
  const TileK k{shared.k[key_stage]}, v{shared.v[key_stage]};
  const auto k_for_dq = columns_of<kDqColumns>(k, kDqByQueries ? 0 : warpgroup * kDqColumns);
  const std::conditional_t<kFactorsStay, const UnmaskedIterations&, UnmaskedIterations> unmasked = f.unmasked;
  const float logits_factor = f.logits, product_factor = f.product, ds_factor = f.ds, dq_factor = f.dq;
  // opaque() keeps these in registers: else each iteration would compute or load them again between its products.
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x % kWarpgroup)), ds_offset = ptx::opaque(store_offset());
  const float dq_sums_scale = sums == Sums::integers ? ptx::opaque(scheduler.exponents(w).dq_sums_scale) : 0.f;
  Target target{};  // of the iteration before
  Accumulator<Dim> dk, dv;
  dk.zero(), dv.zero();
  ptx::fence_operand(dk.x), ptx::fence_operand(dv.x);  // else ptxas sets them to 0 twice
  // Issues dq of the iteration before.
  const auto issue_dq = [&](Accumulator<kDqColumns>& dq) {
    ptx::wgmma_fence();
    mma_AtB(dq, TileDs{shared.ds[(n - 1) % kDsStages]}, kDqByQueries ? warpgroup : 0, k_for_dq, 0);
    ptx::wgmma_commit();
  };
  const auto add_dq = [&](Accumulator<kDqColumns>& dq) {
    if (!kUsual) dq.scale(kFactorsStay ? f.dq : dq_factor);
    add(target, warpgroup, dq, thread);
  };
  const auto wait_q = [&](unsigned step) { shared.q_pipe.full[step % kStages].wait(step / kStages % 2); };
  [[maybe_unused]] int head = 0;  // of the group
  if (kAwaitsNext && iterations) wait_q(n);
  int left = iterations;
  if (kPassesFirst && warpgroup == 1 && f.passes_first) {
    if (sent) release_sent(key_stage ^ 1, (n - 1) % kDsStages);
    target = pass_first(warpgroup, n, dq_sums_scale, ds_offset);
    --left, ++n;
    if constexpr (kByHead) head = next_head(head);
    if (left) wait_q(n);
  }
  for (; left; --left, ++n) {
    const int stage = n % kStages, do_stage = n % kDoStages;
    const TileQ q{shared.q[stage]}, do_{shared.do_[do_stage]};
    const Rows& rows = shared.rows[stage];
    Accumulator<kQueries> s, dp;
    Operand<T, kQueries> p, ds;
    // Wait for q and do; issue s = k q^T and dp = v do^T.
    if (!kAwaitsNext) wait_q(n);
    ptx::wgmma_fence();
    mma_ABt(s, k, first_row, q, false);
    ptx::wgmma_commit();
    shared.do_pipe.full[do_stage].wait(n / kDoStages % 2);
    ptx::wgmma_fence();
    mma_ABt(dp, v, first_row, do_, false);
    ptx::wgmma_commit();
    if (left < iterations)
      ping_pong_arrive(warpgroup);  // ends the turn that began in the iteration before
    else if (sent)
      release_sent(key_stage ^ 1, (n - 1) % kDsStages);
    Kept kept;
    if constexpr (kDrops && kEarlyKept) find_kept(w, head, first_row, rows.first, kept);  // beside the products
    // p = exp(scale s - lse).
    ptx::wgmma_wait<1>();
    ptx::fence_operand(s.x);
    ColumnValues<kQueries> columns(kAlibi || kMasked ? rows.delta : rows.lse);
    take_P<kUsual>(s, logits_factor, columns, rows, w, w.first_key + first_row, head, warpgroup, n);
    if (!unmasked.has(left)) mask_P(a, s, w, w.first_key + first_row, rows.first);
    if constexpr (kEarlyP && (!kDrops || kEarlyKept)) convert_p(s, kept, p);
    // ds = p (dp - delta); release the rows and, unless dv leaves there, v after the last iteration.
    ptx::wgmma_wait<0>();
    ptx::fence_operand(dp.x);
    if (kSendsFromDs && left == 1) arrive_as_warp(shared.v_pipe.empty[key_stage]);
    if constexpr (kDrops && !kEarlyKept) find_kept(w, head, first_row, rows.first, kept);
    if constexpr (kDrops) drop(dp, kept);
    columns.read(rows.delta);
    const Target next_target = target_of<sums>(rows, dq_row(warpgroup), dq_sums_scale);
    shared.rows_empty[stage].arrive();
#pragma unroll
    for (int i = 0; i < kQueries / 2; ++i) dp.x[i] = s.x[i] * __fmaf_rn(dp.x[i], product_factor, -columns.of(i));
    if (!kUsual) dp.scale(kFactorsStay ? f.ds : ds_factor);
    if constexpr (!kEarlyP || (kDrops && !kEarlyKept)) convert_p(s, kept, p);
    convert(dp, ds);
    put_ds(ds, warpgroup, n, ds_offset);
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
    if (left < iterations) arrive_as_warp(shared.ds_pipe.empty[(n - 1) % kDsStages]), add_dq(dq);
    target = next_target;
    // Release q.
    ptx::wgmma_wait<0>();
    ptx::fence_operand(dk.x);
    arrive_as_warp(shared.q_pipe.empty[stage]);
    if constexpr (kByHead) head = next_head(head);
  }
  // dq of the last iteration.
  if (iterations) {
    ping_pong_arrive(warpgroup);
    Accumulator<kDqColumns> dq;
    shared.ds_pipe.full[(n - 1) % kDsStages].wait((n - 1) / kDsStages % 2);
    issue_dq(dq);
    ptx::wgmma_wait<0>();
    ptx::fence_operand(dq.x);
    kSendsFromDs ? shared.k_pipe.empty[key_stage].arrive() : arrive_as_warp(shared.ds_pipe.empty[(n - 1) % kDsStages]);
    add_dq(dq);
  } else {
    if (sent) release_sent(key_stage ^ 1, (n - 1) % kDsStages);
    shared.k_pipe.empty[key_stage].arrive(), arrive_as_warp(shared.v_pipe.empty[key_stage]);
  }
  f.dv.apply(dv), f.dk.apply(dk);
  write(warpgroup, w, dk, dv, key_stage, iterations, n, ds_offset);
}

}  // namespace octet::cuda::sm90
