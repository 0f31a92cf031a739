// dq, dk, dv for blocks of keys, one block and kv head at a time (FlashAttention-2, arXiv 2307.08691, algorithm 2):
//
//   for each head of the group, for each tile of queries that sees the block:
//     p = exp(scale k q^T - lse)      ds = p (v do^T - delta)      both with a key in each row
//     dv += p do    dk += ds q    dq(tile) += ds^T k
//
// Transposed, p and ds stay in registers as left operands of dv and dk; only ds goes through shared memory, for dq,
// which sums over the keys of both warpgroups. Each warpgroup multiplies for dq the ds of the step before, so the two
// need not meet: while one computes exponentials, the other's products run. Sums of dq over blocks of keys happen in
// L2.
#pragma once
#include "cuda/ptx/grid.h"
#include "cuda/sm90/backward_parts.h"

namespace octet::cuda::sm90 {

template <class T, int Dim, Sums sums>
struct Backward {
  using Tile = BackwardTile<Dim>;
  static constexpr int kQueries = Tile::kQueries, kKeys = Tile::kKeys;
  static constexpr int kWarpgroups = 2, kReaders = kWarpgroups * kWarpgroup, kThreads = kReaders + kWarpgroup;
  static constexpr int kWarps = kBackwardWarps;
  static constexpr int kStages = Tile::kStages, kKeyStages = Tile::kKeyStages, kDsStages = 2;
  // A warpgroup's part of dq: 64 queries, and as many channels as make half of it.
  static constexpr bool kDqByQueries = kQueries > kWarpgroupRows;
  static constexpr int kDqColumns = kDqByQueries ? Dim : Dim / kWarpgroups;
  static constexpr int kDqNumbers = kWarpgroupRows * kDqColumns;

  // What registers are there for: p in 16 bits beside s.
  static constexpr bool kEarlyP = Dim == 128;
  using Schedule = BackwardSchedule<kQueries, kKeys>;
  using TileQ = SharedTile<T, kQueries, Dim>;
  using TileK = SharedTile<T, kKeys, Dim>;
  using TileDs = SharedTile<T, kKeys, kQueries>;

  using Rows = QueryRows<kQueries>;

  struct alignas(kSwizzleBytes) Shared {
    unsigned char k[kKeyStages][TileK::kBytes], v[TileK::kBytes];
    unsigned char q[kStages][TileQ::kBytes], do_[kStages][TileQ::kBytes];
    unsigned char ds[kDsStages][TileDs::kBytes];
    Rows rows[kStages];
    Ring<kKeyStages> k_ring;
    Ring<1> v_ring;
    Ring<kStages> q_ring, do_ring;
    Barrier rows_empty[kStages];  // at which all threads arrive, as each reads its columns
    Ring<kDsStages> ds_ring;
    // In turn. The loader writes the next once v of the one before the last was given back, in the last step of that
    // block, so that nobody reads the third last.
    static constexpr int kWorks = 3;
    BackwardWork work[kWorks];

    __device__ void init() {
      k_ring.init(kReaders), v_ring.init(kWarps), q_ring.init(kWarps), do_ring.init(kWarps);
      for (Barrier& empty : rows_empty) empty.init(kReaders);
      for (int i = 0; i < kDsStages; ++i) ds_ring.full[i].init(kWarps), ds_ring.empty[i].init(kWarps);
    }
  };
  static constexpr int kSharedBytes = sizeof(Shared) + kSwizzleBytes;

  const BackwardArguments& a;
  Shared& shared;
  const Schedule schedule{a};

  __device__ void load_all() {
    namespace ptx = ::cuda::ptx;
    const auto fetch = [](void* to, const void* from, uint32_t bytes, Barrier& full) {
      ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, to, from, bytes, &full.word);
    };
    const int group = a.heads / a.kv_heads;
    unsigned n = 0, works = 0;  // steps, blocks of keys
    for (unsigned number = blockIdx.x;; number = gridDim.x + atomicAdd(a.counter, 1u)) {
      BackwardWork& w = shared.work[works % Shared::kWorks];
      schedule.find(number, w);
      if (w.block >= 0 && w.k.index < 0) continue;  // past the last block of packed sequences
      const int k_stage = works % kKeyStages;
      const auto await_k = [&] { shared.k_ring.empty[k_stage].wait(works / kKeyStages % 2 ^ 1); };
      if (w.block < 0) {
        await_k();
        shared.k_ring.full[k_stage].arrive();
        return;
      }
      const int64_t k_tile = (static_cast<int64_t>(w.batch) * a.kv_heads + w.kv_head) * a.k_blocks.count + w.block;
      const auto fetch_keys = [&] {
        shared.v_ring.empty[0].wait(works % 2 ^ 1);
        shared.v_ring.full[0].arrive_expecting(TileK::kBytes);
        fetch(shared.v, a.v + k_tile * TileK::kBytes, TileK::kBytes, shared.v_ring.full[0]);
        await_k();
        shared.k_ring.full[k_stage].arrive_expecting(TileK::kBytes);
        fetch(shared.k[k_stage], a.k + k_tile * TileK::kBytes, TileK::kBytes, shared.k_ring.full[k_stage]);
      };
      // k is given back last, where it has one stage, so q, do and v of the first step come before it.
      Visit visit{w.kv_head * group, w.tiles.start};
      const int steps = group * w.tiles.count();
      for (int left = steps; left; --left, ++n, visit.advance(w.tiles)) {
        const int64_t tile = schedule.q_tile(w, visit);
        const int s = n % kStages;
        const uint32_t empty = n / kStages % 2 ^ 1;
        shared.q_ring.empty[s].wait(empty);
        shared.q_ring.full[s].arrive_expecting(TileQ::kBytes + sizeof(Rows));
        fetch(shared.q[s], a.q + tile * TileQ::kBytes, TileQ::kBytes, shared.q_ring.full[s]);
        shared.rows_empty[s].wait(empty);
        fetch(&shared.rows[s], a.rows + tile * sizeof(Rows), sizeof(Rows), shared.q_ring.full[s]);
        shared.do_ring.empty[s].wait(empty);
        shared.do_ring.full[s].arrive_expecting(TileQ::kBytes);
        fetch(shared.do_[s], a.do_ + tile * TileQ::kBytes, TileQ::kBytes, shared.do_ring.full[s]);
        if (left == steps) fetch_keys();
      }
      if (!steps) fetch_keys();
      ++works;
    }
  }

  // The query that a warpgroup's part of a tile of dq begins with.
  static __device__ int dq_row(int warpgroup) { return kDqByQueries ? warpgroup * kWarpgroupRows : 0; }
  // Adds to that part.
  __device__ void add(const Target& target, int warpgroup, const Accumulator<kDqColumns>& x) const {
    const int64_t start = (static_cast<int64_t>(target.tile) * kWarpgroups + warpgroup) * kDqNumbers;
    add_to_sums<Rows, sums, kSumsByFour<Dim, sums>>(a, target, start, dq_row(warpgroup), x);
  }

  __device__ void compute_all(int warpgroup) {
    unsigned n = 0;  // steps before this one, of all blocks: where each ring stands
    const int group = a.heads / a.kv_heads, my_keys = warpgroup * kWarpgroupRows;
    const TileK v{shared.v};
    for (unsigned works = 0;; ++works) {
      const int k_stage = works % kKeyStages;
      const TileK k{shared.k[k_stage]};
      const auto k_for_dq = columns_of<kDqColumns>(k, kDqByQueries ? 0 : warpgroup * kDqColumns);
      shared.k_ring.full[k_stage].wait(works / kKeyStages % 2);
      const BackwardWork& w = shared.work[works % Shared::kWorks];
      if (w.block < 0) break;
      const Powers& e = a.powers[w.batch * a.kv_heads + w.kv_head];
      const float scale_log2e = a.scale * 1.44269504f * exp2f(static_cast<float>(-e.q - e.k));
      const float product_scale = exp2f(static_cast<float>(e.product));
      const int steps = group * w.tiles.count();
      Target target{};  // of the step before
      Accumulator<Dim> dk, dv;
      dk.zero(), dv.zero();
      // dq of step n - 1.
      const auto issue_dq = [&](Accumulator<kDqColumns>& dq) {
        ptx::wgmma_fence();
        mm_AtB(dq, TileDs{shared.ds[(n - 1) % kDsStages]}, kDqByQueries ? warpgroup : 0, k_for_dq, 0);
        ptx::wgmma_commit();
      };
      const auto add_dq = [&](const Accumulator<kDqColumns>& dq) {
        arrive_as_warp(shared.ds_ring.empty[(n - 1) % kDsStages]);
        add(target, warpgroup, dq);
      };
      shared.v_ring.full[0].wait(works % 2);
      for (int left = steps; left; --left, ++n) {
        const int stage = n % kStages, ds_stage = n % kDsStages;
        const uint32_t parity = n / kStages % 2;
        const TileQ q{shared.q[stage]}, do_{shared.do_[stage]};
        const Rows& rows = shared.rows[stage];
        Accumulator<kQueries> s, dp;
        Operand<T, kQueries> p, ds;
        shared.q_ring.full[stage].wait(parity);
        ptx::wgmma_fence();
        mm_ABt(s, k, my_keys, q, false);
        ptx::wgmma_commit();
        shared.do_ring.full[stage].wait(parity);
        ptx::wgmma_fence();
        mm_ABt(dp, v, my_keys, do_, false);
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        ptx::pin(s.x);
        ColumnValues<kQueries> columns(rows.lse);
#pragma unroll
        for (int i = 0; i < kQueries / 2; ++i) s.x[i] = ptx::exp2(__fmaf_rn(s.x[i], scale_log2e, -columns.of(i)));
        const int query = rows.first;
        if (!sees_all(a, w, w.first_key, kKeys, query, kQueries)) mask_weights(a, s, w, w.first_key + my_keys, query);
        if constexpr (kEarlyP) convert(s, p);
        ptx::wgmma_wait<0>();
        ptx::pin(dp.x);
        if (left == 1) arrive_as_warp(shared.v_ring.empty[0]);
        columns.read(rows.delta);
        const Target next_target = target_of<sums>(rows, dq_row(warpgroup), e.sums_unit);
        shared.rows_empty[stage].arrive();
#pragma unroll
        for (int i = 0; i < kQueries / 2; ++i) dp.x[i] = s.x[i] * __fmaf_rn(dp.x[i], product_scale, -columns.of(i));
        if constexpr (!kEarlyP) convert(s, p);
        convert(dp, ds);
        shared.ds_ring.empty[ds_stage].wait(n / kDsStages % 2 ^ 1);
        store(ds, TileDs{shared.ds[ds_stage]}, my_keys);
        ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
        arrive_as_warp(shared.ds_ring.full[ds_stage]);
        ptx::wgmma_fence();
        mma_AB(dv, p, do_);
        ptx::wgmma_commit();
        // In the first step of a block there is no dq to multiply; the product is made and left.
        Accumulator<kDqColumns> dq;
        if (left < steps) shared.ds_ring.full[(n - 1) % kDsStages].wait((n - 1) / kDsStages % 2);
        issue_dq(dq);
        ptx::wgmma_fence();
        mma_AB(dk, ds, q);
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        ptx::pin(dv.x);
        arrive_as_warp(shared.do_ring.empty[stage]);
        ptx::pin(dq.x);
        if (left < steps) add_dq(dq);
        target = next_target;
        ptx::wgmma_wait<0>();
        ptx::pin(dk.x);
        arrive_as_warp(shared.q_ring.empty[stage]);
      }
      if (steps) {
        Accumulator<kDqColumns> dq;
        shared.ds_ring.full[(n - 1) % kDsStages].wait((n - 1) / kDsStages % 2);
        issue_dq(dq);
        ptx::wgmma_wait<0>();
        ptx::pin(dq.x);
        shared.k_ring.empty[k_stage].arrive();
        add_dq(dq);
      } else {
        shared.k_ring.empty[k_stage].arrive(), arrive_as_warp(shared.v_ring.empty[0]);
      }
      const int key = w.first_key + my_keys;
      write_keys(a.dv, w, key, 0, dv, 1.f, -a.weight_exponent - e.do_, a.dim_v);
      write_keys(a.dk, w, key, 0, dk, a.scale, -a.weight_exponent - e.product - e.do_ - e.v - e.q, a.dim);
    }
  }
};

template <class T, int Dim, Sums sums>
__global__ void __launch_bounds__(Backward<T, Dim, sums>::kThreads, 1)
    backward(const __grid_constant__ BackwardArguments arguments) {
  using Kernel = Backward<T, Dim, sums>;
  extern __shared__ unsigned char memory[];
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory + (-base & (kSwizzleBytes - 1)));
  Kernel kernel{arguments, shared};
  ptx::next_grid_may_start();
  if (threadIdx.x == 0) {
    shared.init();
    publish_barriers();
  }
  __syncthreads();
  ptx::wait_for_previous_grid();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    ptx::give_registers<kBackwardLoaderRegisters>();
    if (threadIdx.x == 0) kernel.load_all();
  } else {
    ptx::take_registers<kBackwardRegisters>();
    kernel.compute_all(warpgroup - 1);
  }
}

}  // namespace octet::cuda::sm90
