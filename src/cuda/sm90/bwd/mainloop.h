// dq, dk, dv for blocks of keys, one block and kv head at a time (FlashAttention-2, arXiv 2307.08691, algorithm 2):
//
//   for each head of the group, for each tile of queries that sees the block:
//     p = exp(scale k q^T - lse)      ds = p (v do^T - delta)      both with a key in each row
//     dv += p do    dk += ds q    dq(tile) += ds^T k
//
// Transposed, p and ds stay in registers as left operands of dv and dk; only ds goes through shared memory, for dq,
// which sums over the keys of both warpgroups. Each warpgroup multiplies for dq the ds of the step before, so the two
// need not meet. They take ping_pong, from the products of p and ds on to those of the next step's logits: while one
// computes exponentials, the other's products run. Sums of dq over blocks of keys happen in L2. Of the warpgroup that
// loads, one thread fetches all operands, and three warps convert k and v of the next block and clear sums of a later
// head.
#pragma once
#include "cuda/ptx/grid.h"
#include "cuda/sm90/bwd/convert_keys.h"
#include "cuda/sm90/bwd/epilogue.h"

namespace octet::cuda::sm90 {

template <class T, int Dim, Sums sums>
struct Backward {
  using Tile = BackwardTile<Dim>;
  static constexpr int kQueries = Tile::kQueries, kKeys = Tile::kKeys;
  static constexpr int kWarpgroups = 2, kConsumerThreads = kWarpgroups * kWarpgroup, kThreads = kConsumerThreads + kWarpgroup;
  static constexpr int kWarps = kBackwardWarps;
  static constexpr int kStages = Tile::kStages, kDoStages = Tile::kDoStages, kDsStages = 2;
  // The next block is drawn when so many steps are left to fetch: early enough to make its k and v ready, and late
  // enough for all thread blocks to end together.
  static constexpr int kPrefetchDistance = 6, kKeyStages = 2;
  static constexpr int kPingPongBarrier = 2;  // and the next, one for each warpgroup; see Converter::kBarrier
  // A warpgroup's part of dq: 64 queries, and as many channels as make half of it.
  static constexpr bool kDqByQueries = kQueries > kWarpgroupRows;
  static constexpr int kDqColumns = kDqByQueries ? Dim : Dim / kWarpgroups;
  static constexpr int kDqNumbers = kWarpgroupRows * kDqColumns;

  // What registers are there for: p in 16 bits beside s.
  static constexpr bool kEarlyP = Dim == 128;
  // Whether a step waits for the next one's q before it adds to dq, as reductions delay what follows them.
  static constexpr bool kAwaitsNext = Dim == 128;
  using Schedule = KeyBlockScheduler<kQueries, kKeys>;
  using TileQ = SharedTile<T, kQueries, Dim>;
  using TileK = SharedTile<T, kKeys, Dim>;
  using Converter = KeyConverter<T, kKeys, Dim>;
  using TileDs = SharedTile<T, kKeys, kQueries>;

  using Rows = QueryRows<kQueries>;

  struct alignas(kSwizzleBytes) Shared {
    unsigned char k[kKeyStages][TileK::kBytes], v[kKeyStages][TileK::kBytes];
    unsigned char q[kStages][TileQ::kBytes], do_[kDoStages][TileQ::kBytes];
    unsigned char ds[kDsStages][TileDs::kBytes];
    Rows rows[kStages];
    Pipeline<kKeyStages> k_pipe, v_pipe;
    Barrier k_rows_full[kKeyStages], v_rows_full[kKeyStages];  // k and v as they lie have come
    Pipeline<kStages> q_pipe;
    Pipeline<kDoStages> do_pipe;
    Barrier rows_empty[kStages];  // at which all threads arrive, as each reads its columns
    Pipeline<kDsStages> ds_pipe;
    static constexpr int kTileSlots = 3;
    Pipeline<kTileSlots> tile_pipe;
    KeyBlockInfo work[kTileSlots];

    // `consumers`: threads that read work.
    __device__ void init(int readers) {
      k_pipe.init(kConsumerThreads), v_pipe.init(kWarps), q_pipe.init(kWarps), do_pipe.init(kWarps);
      for (int i = 0; i < kKeyStages; ++i) k_rows_full[i].init(1), v_rows_full[i].init(1);
      tile_pipe.init(readers);
      for (Barrier& empty : rows_empty) empty.init(kConsumerThreads);
      for (int i = 0; i < kDsStages; ++i) ds_pipe.full[i].init(kWarps), ds_pipe.empty[i].init(kWarps);
    }
  };
  static constexpr int kSharedBytes = sizeof(Shared) + kSwizzleBytes;
  static_assert(kSharedBytes <= kMostSharedBytes);

  const BackwardParams& a;
  Shared& shared;
  const Schedule schedule{a};

  // Converts k and v of a block of keys while the one before is worked on, unless they come as tiles.
  __device__ void convert_keys(int thread) {
    if (a.k) return;
    uint32_t phases = 0;  // of the barriers of k and v, in each stage
    for (unsigned tile_index = 0;; ++tile_index) {
      const int stage = tile_index % kKeyStages;
      KeyBlockInfo& w = shared.work[tile_index % Shared::kTileSlots];
      // One thread looks at the barrier from time to time, as looking takes the others' time.
      if (thread == 0) shared.k_rows_full[stage].wait_asleep(phases >> rows_phase_bit(true, stage) & 1);
      __syncwarp();
      ptx::barrier_sync(Converter::kBarrier, Converter::kThreads);
      if (!w.valid()) return;
      convert_rows(thread, true, w, stage, phases);
      if (thread == 0) await_zeros(a, w, a.k_blocks.count);
      convert_rows(thread, false, w, stage, phases);
      clear_ahead<kQueries * Dim, Converter::kThreads>(a, w, w.block, a.k_blocks.count, thread, Converter::kBarrier);
      shared.tile_pipe.empty[tile_index % Shared::kTileSlots].arrive();
    }
  }

  __device__ void fetch_tiles(KeyBlockInfo& w, int stage) const {
    const int head = w.batch * a.kv_heads + w.kv_head;
    const int64_t tile = (static_cast<int64_t>(head) * a.k_blocks.count + w.block) * TileK::kBytes;
    const Exponents& e = schedule.exponents(w);
    w.exponents.k = e.k, w.exponents.v = e.v, w.exponents.ds = 0;
    shared.k_pipe.full[stage].arrive_expecting(TileK::kBytes);
    fetch(shared.k[stage], a.k + tile, TileK::kBytes, shared.k_pipe.full[stage]);
    shared.v_pipe.full[stage].arrive_expecting(TileK::kBytes);
    fetch(shared.v[stage], a.v + tile, TileK::kBytes, shared.v_pipe.full[stage]);
  }

  __device__ Barrier& rows_full(bool is_k, int stage) const {
    return (is_k ? shared.k_rows_full : shared.v_rows_full)[stage];
  }
  static __device__ int rows_phase_bit(bool is_k, int stage) { return 2 * stage + is_k; }

  __device__ void fetch_rows(bool is_k, const KeyBlockInfo& w, int stage) const {
    Barrier& full = rows_full(is_k, stage);
    full.arrive_expecting(TileK::kBytes);
    load(TileK{is_k ? shared.k[stage] : shared.v[stage]}, is_k ? a.k_rows : a.v_rows, w.k.first + w.first_key,
         w.kv_head, w.batch, &full.word);
  }

  // Converts k or v once it has come.
  __device__ void convert_rows(int thread, bool is_k, KeyBlockInfo& w, int stage, uint32_t& phases) const {
    const auto await = [&] {
      const int bit = rows_phase_bit(is_k, stage);
      rows_full(is_k, stage).wait(phases >> bit & 1);
      phases ^= 1u << bit;
    };
    const auto fetch_again = [&] {
      if (thread == 0) fetch_rows(is_k, w, stage);
      __syncwarp();
      await();
    };
    const int head = w.batch * a.kv_heads + w.kv_head, channel = Converter::channel(thread);
    const KeyRange seen = a.mask.seen(w.q.tokens, w.k.tokens);
    const int first_row = max(seen.first - w.first_key, 0);
    const Converter converter{.thread = static_cast<unsigned>(thread),
                              .tile = {is_k ? shared.k[stage] : shared.v[stage]},
                              .first_row = static_cast<unsigned>(first_row),
                              .rows = static_cast<unsigned>(max(min(seen.last - w.first_key, kKeys) - first_row, 0)),
                              .bf16 = a.rows_are_bf16,
                              .mean = is_k && channel < a.dim ? a.k_mean + head * a.dim + channel : nullptr};
    const Exponents& e = schedule.exponents(w);
    await();
    const auto fitted = is_k ? converter.fit(e.k, Converter::kLargest, e.k == kMaxKeyExponent, fetch_again)
                             : converter.fit(e.v, fminf(e.largest_v, Converter::kLargest), false, fetch_again);
    if (thread > 0) return;
    if (is_k)
      w.exponents.k = fitted.exponent;
    else
      w.exponents.v = fitted.exponent, w.exponents.ds = fitted.largest > Converter::kNone
                                                   ? max(fitted.largest + e.v + 1 - exponent_above(e.largest_v), 0)
                                                   : 0;
    (is_k ? shared.k_pipe : shared.v_pipe).full[stage].arrive();
  }

  // Fetches q and do, and blocks of keys ahead of their first step.
  __device__ void produce() {
    unsigned n = 0;  // steps
    next_tile(0);
    for (unsigned tile_index = 0;; ++tile_index) {
      const int slot = tile_index % Shared::kTileSlots;
      const KeyBlockInfo& w = shared.work[slot];
      if (!w.valid()) return;
      if (w.part == 0)
        load_tiles<true>(w, tile_index, n);
      else
        load_tiles<false>(w, tile_index, n);
      shared.tile_pipe.empty[slot].arrive();
    }
  }

  template <bool kFirstPart>
  __device__ void load_tiles(const KeyBlockInfo& w, unsigned tile_index, unsigned& n) {
    const int group = a.heads / a.kv_heads, steps = group * w.tiles.count();
    const int prefetch_at = max(min(steps, kPrefetchDistance) - 1, 0);  // the next block is drawn before so many last steps
    MBlock m_block{w.tiles.start, 0};
    for (int left = steps;; --left, ++n, m_block.advance(w.tiles, group)) {
      if (left == prefetch_at) next_tile(tile_index + 1);
      if (!left) return;
      const int64_t tile = schedule.q_tile(w, m_block, group);
      const int s = n % kStages, do_stage = n % kDoStages;
      const uint32_t empty = n / kStages % 2 ^ 1;
      shared.q_pipe.empty[s].wait(empty);
      shared.q_pipe.full[s].arrive_expecting(TileQ::kBytes + sizeof(Rows));
      fetch(shared.q[s], a.q + tile * TileQ::kBytes, TileQ::kBytes, shared.q_pipe.full[s]);
      shared.rows_empty[s].wait(empty);
      fetch(&shared.rows[s], schedule.template rows<Rows, kFirstPart>(w, tile), sizeof(Rows), shared.q_pipe.full[s]);
      shared.do_pipe.empty[do_stage].wait(n / kDoStages % 2 ^ 1);
      shared.do_pipe.full[do_stage].arrive_expecting(TileQ::kBytes);
      fetch(shared.do_[do_stage], a.do_ + tile * TileQ::kBytes, TileQ::kBytes, shared.do_pipe.full[do_stage]);
    }
  }

  // Draws the next block of keys, or takes the last for the next part of its queries, and fetches its k and v.
  __device__ void next_tile(unsigned tile_index) {
    const int slot = tile_index % Shared::kTileSlots, stage = tile_index % kKeyStages;
    KeyBlockInfo& w = shared.work[slot];
    shared.tile_pipe.empty[slot].wait(tile_index / Shared::kTileSlots % 2 ^ 1);
    const KeyBlockInfo& last = shared.work[(tile_index + Shared::kTileSlots - 1) % Shared::kTileSlots];
    const bool again = tile_index > 0 && schedule.next_part(last, w);
    while (!again) {
      schedule.find(atomicAdd(a.counter, 1u), w);
      if (!w.valid() || w.k.index >= 0) break;  // not past the last block of packed sequences
    }
    shared.tile_pipe.full[slot].arrive();
    if (!w.valid()) {
      shared.k_rows_full[stage].arrive();
      return;
    }
    const uint32_t empty = tile_index / kKeyStages % 2 ^ 1;
    shared.k_pipe.empty[stage].wait(empty), shared.v_pipe.empty[stage].wait(empty);
    if (a.k)
      fetch_tiles(w, stage);
    else
      fetch_rows(true, w, stage), fetch_rows(false, w, stage);
  }

  // The query that a warpgroup's part of a tile of dq begins with.
  static __device__ int dq_row(int warpgroup) { return kDqByQueries ? warpgroup * kWarpgroupRows : 0; }
  // Adds to that part.
  __device__ void add(const Target& target, int warpgroup, const Accumulator<kDqColumns>& x, int thread) const {
    const int64_t start = (static_cast<int64_t>(target.tile) * kWarpgroups + warpgroup) * kDqNumbers;
    add_to_sums<Rows, sums, kSumsAtOnce<Dim, sums>>(a, target, start, dq_row(warpgroup), x, thread);
  }

  static __device__ void ping_pong_wait(int warpgroup) { ptx::barrier_sync(kPingPongBarrier + warpgroup, kConsumerThreads); }
  static __device__ void ping_pong_arrive(int warpgroup) { ptx::barrier_arrive(kPingPongBarrier + 1 - warpgroup, kConsumerThreads); }

  __device__ void consume(int warpgroup) {
    unsigned n = 0;                            // steps before this one, of all blocks: where each pipeline stands
    if (warpgroup == 1) ping_pong_arrive(warpgroup);  // the first turn is the other's
    for (unsigned tile_index = 0;; ++tile_index) {
      const int slot = tile_index % Shared::kTileSlots, key_stage = tile_index % kKeyStages;
      const uint32_t key_phase = tile_index / kKeyStages % 2;
      shared.tile_pipe.full[slot].wait(tile_index / Shared::kTileSlots % 2);
      const KeyBlockInfo& w = shared.work[slot];
      if (!w.valid()) break;
      shared.k_pipe.full[key_stage].wait(key_phase);
      shared.v_pipe.full[key_stage].wait(key_phase);
      const Exponents& e = schedule.exponents(w);
      Accumulator<Dim> dk, dv;
      dk.zero(), dv.zero();
      if (sums == Sums::integers || (w.exponents.k == e.k && w.exponents.ds == 0 && e.dq == 0))
        compute<true>(warpgroup, w, e, key_stage, n, dk, dv);
      else
        compute<false>(warpgroup, w, e, key_stage, n, dk, dv);
      const int key = w.first_key + warpgroup * kWarpgroupRows;
      write_keys(a.dv, w, key, 0, dv, 1.f, -a.weight_exponent - e.do_, a.dim_v);
      write_keys(a.dk, w, key, 0, dk, a.scale, w.exponents.ds - a.weight_exponent - e.product - e.do_ - e.v - e.q, a.dim);
      shared.tile_pipe.empty[slot].arrive();
    }
  }

  // The products of a block. `kUsual`: its ds and dq have the exponents of the head, and of its first part.
  template <bool kUsual>
  __device__ void compute(int warpgroup, const KeyBlockInfo& w, const Exponents& e, int key_stage, unsigned& n,
                          Accumulator<Dim>& dk, Accumulator<Dim>& dv) {
    const int group = a.heads / a.kv_heads, my_keys = warpgroup * kWarpgroupRows;
    const TileK k{shared.k[key_stage]}, v{shared.v[key_stage]};
    const auto k_for_dq = columns_of<kDqColumns>(k, kDqByQueries ? 0 : warpgroup * kDqColumns);
    const KeyExponents mine = w.exponents;
    const float scale_log2e = a.scale * 1.44269504f * exp2f(static_cast<float>(-e.q - mine.k));
    const float product_scale = exp2f(static_cast<float>(e.product + e.v - mine.v));
    const int steps = group * w.tiles.count();
    const UnmaskedSteps unmasked(a, w, w.first_key, kKeys, kQueries, group);
    const float ds_scale = exp2f(static_cast<float>(-mine.ds)),
                dq_scale = exp2f(static_cast<float>(mine.ds + e.k - mine.k + e.dq));
    // Kept in registers: the steps would work them out again between their products.
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x % kWarpgroup)), ds_offset = ptx::opaque(store_offset());
    Target target{};  // of the step before
    // dq of step n - 1.
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
    if (kAwaitsNext && steps) wait_q(n);
    for (int left = steps; left; --left, ++n) {
      const int stage = n % kStages, do_stage = n % kDoStages, ds_stage = n % kDsStages;
      const TileQ q{shared.q[stage]}, do_{shared.do_[do_stage]};
      const Rows& rows = shared.rows[stage];
      Accumulator<kQueries> s, dp;
      Operand<T, kQueries> p, ds;
      if (!kAwaitsNext) wait_q(n);
      ptx::wgmma_fence();
      mma_ABt(s, k, my_keys, q, false);
      ptx::wgmma_commit();
      shared.do_pipe.full[do_stage].wait(n / kDoStages % 2);
      ptx::wgmma_fence();
      mma_ABt(dp, v, my_keys, do_, false);
      ptx::wgmma_commit();
      if (left < steps) ping_pong_arrive(warpgroup);  // taken in the step before
      ptx::wgmma_wait<1>();
      ptx::fence_operand(s.x);
      ColumnValues<kQueries> columns(rows.lse);
#pragma unroll
      for (int i = 0; i < kQueries / 2; ++i) s.x[i] = ptx::exp2(__fmaf_rn(s.x[i], scale_log2e, -columns.of(i)));
      if (!unmasked.has(left)) mask_P(a, s, w, w.first_key + my_keys, rows.first);
      if constexpr (kEarlyP) convert(s, p);
      ptx::wgmma_wait<0>();
      ptx::fence_operand(dp.x);
      if (left == 1) arrive_as_warp(shared.v_pipe.empty[key_stage]);
      columns.read(rows.delta);
      const Target next_target = target_of<sums>(rows, dq_row(warpgroup), e.dq_sums_unit);
      shared.rows_empty[stage].arrive();
#pragma unroll
      for (int i = 0; i < kQueries / 2; ++i) dp.x[i] = s.x[i] * __fmaf_rn(dp.x[i], product_scale, -columns.of(i));
      if (!kUsual) dp.scale(ds_scale);
      if constexpr (!kEarlyP) convert(s, p);
      convert(dp, ds);
      shared.ds_pipe.empty[ds_stage].wait(n / kDsStages % 2 ^ 1);
      store(ds, TileDs{shared.ds[ds_stage]}, my_keys, ds_offset);
      ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
      arrive_as_warp(shared.ds_pipe.full[ds_stage]);
      ping_pong_wait(warpgroup);
      ptx::wgmma_fence();
      mma_AB(dv, p, do_);
      ptx::wgmma_commit();
      // In the first step of a block there is no dq to multiply; the product is made and left.
      Accumulator<kDqColumns> dq;
      if (left < steps) shared.ds_pipe.full[(n - 1) % kDsStages].wait((n - 1) / kDsStages % 2);
      issue_dq(dq);
      ptx::wgmma_fence();
      mma_AB(dk, ds, q);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      ptx::fence_operand(dv.x);
      arrive_as_warp(shared.do_pipe.empty[do_stage]);
      ptx::fence_operand(dq.x);
      if (kAwaitsNext && left > 1) wait_q(n + 1);
      if (left < steps) add_dq(dq);
      target = next_target;
      ptx::wgmma_wait<0>();
      ptx::fence_operand(dk.x);
      arrive_as_warp(shared.q_pipe.empty[stage]);
    }
    if (steps) {
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
  }
};

template <class T, int Dim, Sums sums>
__global__ void __launch_bounds__(Backward<T, Dim, sums>::kThreads, 1)
    backward(const __grid_constant__ BackwardParams arguments) {
  using Kernel = Backward<T, Dim, sums>;
  extern __shared__ unsigned char memory[];
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory + (-base & (kSwizzleBytes - 1)));
  Kernel kernel{arguments, shared};
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
    shared.init(Kernel::kConsumerThreads + 1 + (arguments.k ? 0 : Kernel::Converter::kThreads));
    publish_barriers();
  }
  __syncthreads();
  ptx::griddepcontrol_wait();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    ptx::reg_dealloc<kBackwardProducerRegisters>();
    if (threadIdx.x == 0) kernel.produce();
    if (threadIdx.x >= 32) kernel.convert_keys(threadIdx.x - 32);
  } else {
    ptx::reg_alloc<kBackwardRegisters>();
    kernel.consume(warpgroup - 1);
  }
}

}  // namespace octet::cuda::sm90
