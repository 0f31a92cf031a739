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
#include "cuda/sm90/backward_arguments.h"
#include "cuda/sm90/backward_schedule.h"
#include "cuda/sm90/config.h"
#include "cuda/tile/fragment.h"
#include "cuda/tile/ring.h"
#include "cuda/tile/shared.h"

namespace octet::cuda::sm90 {

template <class T, int Dim, Sums sums>
struct Backward {
  using Tile = BackwardTile<Dim>;
  static constexpr int kQueries = Tile::kQueries, kKeys = Tile::kKeys;
  static constexpr int kWarpgroups = 2, kReaders = kWarpgroups * kWarpgroup, kThreads = kReaders + kWarpgroup;
  static constexpr int kWarps = kBackwardWarps;
  static constexpr int kStages = Tile::kStages, kDsStages = 2;
  // Warpgroups share a block's keys, or, where it has only 64, the channels of dk, dv and dq.
  static constexpr bool kByChannels = kKeys == kWarpgroupRows;
  static constexpr int kChannels = kByChannels ? Dim / kWarpgroups : Dim;
  // A warpgroup's part of dq: 64 queries, and as many channels as make half of it.
  static constexpr bool kDqByQueries = kQueries > kWarpgroupRows;
  static constexpr int kDqColumns = kDqByQueries ? Dim : Dim / kWarpgroups;
  static constexpr int kDqNumbers = kWarpgroupRows * kDqColumns;

  // What registers are there for: p in 16 bits beside s, and dq beside p and ds.
  static constexpr bool kEarlyP = Dim == 128;
  static constexpr bool kDqAlone = kDqColumns > 64;
  using Schedule = BackwardSchedule<kQueries, kKeys>;
  using TileQ = SharedTile<T, kQueries, Dim>;
  using TileK = SharedTile<T, kKeys, Dim>;
  using TileDs = SharedTile<T, kKeys, kQueries>;

  using Rows = QueryRows<kQueries>;

  struct alignas(kSwizzleBytes) Shared {
    unsigned char k[TileK::kBytes], v[TileK::kBytes];
    unsigned char q[kStages][TileQ::kBytes], do_[kStages][TileQ::kBytes];
    unsigned char ds[kDsStages][TileDs::kBytes];
    Rows rows[kStages];
    Ring<1> k_ring, v_ring;
    Ring<kStages> q_ring, do_ring;
    Barrier rows_empty[kStages];  // at which all threads arrive, as each reads its columns
    Ring<kDsStages> ds_ring;
    // In turn. The loader writes the next before k of the last was given back, by all threads, but after that of the
    // one before, which shows that nobody reads the third last.
    static constexpr int kWorks = 3;
    BackwardWork work[kWorks];

    __device__ void init() {
      k_ring.init(kReaders), v_ring.init(kWarps), q_ring.init(kWarps), do_ring.init(kWarps);
      for (Barrier& empty : rows_empty) empty.init(kReaders);
      for (int i = 0; i < kDsStages; ++i) ds_ring.full[i].init(kWarps), ds_ring.empty[i].init(kWarps);
    }
  };
  static constexpr int kSharedBytes = sizeof(Shared) + kSwizzleBytes;

  // One number for each column of a fragment that a thread holds.
  struct ColumnValues {
    float2 x[kQueries / 8];
    __device__ explicit ColumnValues(const float* from) { read(from); }
    __device__ void read(const float* from) {
#pragma unroll
      for (int i = 0; i < kQueries / 8; ++i) x[i] = *reinterpret_cast<const float2*>(from + 8 * i + fragment_column());
    }
    __device__ float of(int element) const { return element % 2 ? x[element / 4].y : x[element / 4].x; }
  };

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
      w = schedule.work_at(number);
      if (w.block >= 0 && w.k.index < 0) continue;  // past the last block of packed sequences
      const uint32_t parity = works % 2;
      if (w.block < 0) {
        shared.k_ring.empty[0].wait(parity ^ 1);
        shared.k_ring.full[0].arrive();
        return;
      }
      const int64_t k_tile = (static_cast<int64_t>(w.batch) * a.kv_heads + w.kv_head) * a.k_blocks.count + w.block;
      const auto fetch_keys = [&](void* to, const unsigned char* from, Ring<1>& ring) {
        ring.empty[0].wait(parity ^ 1);
        ring.full[0].arrive_expecting(TileK::kBytes);
        fetch(to, from + k_tile * TileK::kBytes, TileK::kBytes, ring.full[0]);
      };
      // k is given back last, so q, do and v of the first step come before it.
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
        if (left == steps) fetch_keys(shared.v, a.v, shared.v_ring), fetch_keys(shared.k, a.k, shared.k_ring);
      }
      if (!steps) fetch_keys(shared.v, a.v, shared.v_ring), fetch_keys(shared.k, a.k, shared.k_ring);
      ++works;
    }
  }

  // p of pairs that do not see each other becomes 0. Rows are keys, columns queries.
  __device__ void mask(Accumulator<kQueries>& p, const BackwardWork& w, int key, int query) const {
    const int shift = a.mask.bottom_right ? w.k.tokens - w.q.tokens : 0;
    const int left = a.mask.windowed ? a.mask.left : Mask::kUnbounded;
    const int right = a.mask.windowed ? a.mask.right : Mask::kUnbounded;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int j = key + 8 * row;
      const int distance = j - shift - query - fragment_column() + left;  // of the fragment's column 0
#pragma unroll
      for (int i = 0; i < kQueries / 8; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (j >= w.k.tokens || static_cast<unsigned>(distance - 8 * i - c) > static_cast<unsigned>(left + right))
            p.x[4 * i + 2 * row + c] = 0.f;
    }
  }

  __device__ bool sees_all(const BackwardWork& w, int query) const {
    if (w.first_key + kKeys > w.k.tokens) return false;
    if (!a.mask.windowed) return true;
    const int shift = a.mask.bottom_right ? w.k.tokens - w.q.tokens : 0;
    const int least = w.first_key - shift - (query + kQueries - 1), most = w.first_key + kKeys - 1 - shift - query;
    return least >= -a.mask.left && most <= a.mask.right;
  }

  // All lanes of a warp are done with what a barrier guards.
  static __device__ void arrive(Barrier& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier.arrive();
  }

  // Columns [channel, channel + Columns) of a tile, a multiple of 64.
  template <int Columns, class TileX>
  static __device__ SharedTile<T, TileX::kRows, Columns> columns_of(const TileX& x, int channel) {
    return {x.data + channel / kPanelColumns * TileX::kPanelBytes};
  }

  // Where dq of a step goes: its tile of queries, and what integers in this thread's rows are sums of.
  struct Target {
    int tile;
    float units[kRowsPerThread];
  };
  static __device__ int dq_row(int warpgroup, int half) {
    return (kDqByQueries ? warpgroup * kWarpgroupRows : 0) + fragment_row() + 8 * half;
  }
  __device__ Target target_of(const Rows& rows, int warpgroup, float sums_unit) const {
    Target target{rows.tile};
    if constexpr (sums == Sums::integers)
      for (int half = 0; half < kRowsPerThread; ++half)
        target.units[half] = unit_of_sums(rows.unit[dq_row(warpgroup, half)], sums_unit);
    return target;
  }
  // Adds to this warpgroup's part of a tile.
  __device__ void add(const Target& target, int warpgroup, const Accumulator<kDqColumns>& x) const {
    const int64_t start = (static_cast<int64_t>(target.tile) * kWarpgroups + warpgroup) * kDqNumbers;
    const int thread = threadIdx.x % kWarpgroup;
    if constexpr (kSumsByFour<Dim, sums>) {
      auto* const to = reinterpret_cast<float4*>(static_cast<float*>(a.dq) + start) + thread;
#pragma unroll
      for (int i = 0; i < kDqColumns / 8; ++i)
        atomicAdd(to + i * kWarpgroup, make_float4(x.x[4 * i], x.x[4 * i + 1], x.x[4 * i + 2], x.x[4 * i + 3]));
    } else {
#pragma unroll
      for (int half = 0; half < kRowsPerThread; ++half) {
        // An inf or NaN comes from ds and is in every column. It takes the unit away, and so turns the row into NaN.
        if (sums == Sums::integers && !isfinite(x.x[2 * half]))
          reinterpret_cast<Rows*>(a.rows)[target.tile].unit[dq_row(warpgroup, half)] = __int_as_float(0x7fffffff);
#pragma unroll
        for (int i = 0; i < kDqColumns / 2; ++i) {
          if (i / 2 % 2 != half) continue;
          const int64_t at = start + i * kWarpgroup + thread;
          if constexpr (sums == Sums::integers)
            atomicAdd(static_cast<int*>(a.dq) + at, __float2int_rn(x.x[i] * target.units[half]));
          else
            atomicAdd(static_cast<float*>(a.dq) + at, x.x[i]);
        }
      }
    }
  }

  __device__ void compute_all(int warpgroup) {
    unsigned n = 0;  // steps before this one, of all blocks: where each ring stands
    const int group = a.heads / a.kv_heads, warp = threadIdx.x % kWarpgroup / 32;
    const int my_keys = kByChannels ? 0 : warpgroup * kWarpgroupRows;
    const int my_channel = kByChannels ? warpgroup * kChannels : 0;
    const TileK k{shared.k}, v{shared.v};
    const auto k_for_dq = columns_of<kDqColumns>(k, kDqByQueries ? 0 : warpgroup * kDqColumns);
    for (unsigned works = 0;; ++works) {
      shared.k_ring.full[0].wait(works % 2);
      const BackwardWork& w = shared.work[works % Shared::kWorks];
      if (w.block < 0) break;
      const Powers& e = a.powers[w.batch * a.kv_heads + w.kv_head];
      const float scale_log2e = a.scale * 1.44269504f * exp2f(static_cast<float>(-e.q - e.k));
      const float product_scale = exp2f(static_cast<float>(e.product));
      const int steps = group * w.tiles.count();
      Target target{};  // of the step before
      Accumulator<kChannels> dk, dv;
      dk.zero(), dv.zero();
      // dq of step n - 1.
      const auto issue_dq = [&](Accumulator<kDqColumns>& dq) {
        ptx::wgmma_fence();
        mm_AtB(dq, TileDs{shared.ds[(n - 1) % kDsStages]}, kDqByQueries ? warpgroup : 0, k_for_dq, 0);
        ptx::wgmma_commit();
      };
      const auto add_dq = [&](const Accumulator<kDqColumns>& dq) {
        arrive(shared.ds_ring.empty[(n - 1) % kDsStages]);
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
        ColumnValues columns(rows.lse);
#pragma unroll
        for (int i = 0; i < kQueries / 2; ++i) s.x[i] = ptx::exp2(__fmaf_rn(s.x[i], scale_log2e, -columns.of(i)));
        const int query = rows.first;
        if (!sees_all(w, query)) mask(s, w, w.first_key + my_keys + fragment_row(), query);
        if constexpr (kEarlyP) convert(s, p);
        ptx::wgmma_wait<0>();
        ptx::pin(dp.x);
        if (left == 1) arrive(shared.v_ring.empty[0]);
        columns.read(rows.delta);
        const Target next_target = target_of(rows, warpgroup, e.sums_unit);
        shared.rows_empty[stage].arrive();
#pragma unroll
        for (int i = 0; i < kQueries / 2; ++i) dp.x[i] = s.x[i] * __fmaf_rn(dp.x[i], product_scale, -columns.of(i));
        if constexpr (!kEarlyP) convert(s, p);
        convert(dp, ds);
        shared.ds_ring.empty[ds_stage].wait(n / kDsStages % 2 ^ 1);
        // Where both warpgroups have all of ds, each writes half of it.
        if (!kByChannels || warp / 2 == warpgroup) store(ds, TileDs{shared.ds[ds_stage]}, my_keys);
        ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
        arrive(shared.ds_ring.full[ds_stage]);
        ptx::wgmma_fence();
        mma_AB(dv, p, columns_of<kChannels>(do_, my_channel));
        ptx::wgmma_commit();
        // In the first step of a block there is no dq to multiply; the product is made and left.
        Accumulator<kDqColumns> dq;
        if (left < steps) shared.ds_ring.full[(n - 1) % kDsStages].wait((n - 1) / kDsStages % 2);
        if constexpr (!kDqAlone) issue_dq(dq);
        ptx::wgmma_fence();
        mma_AB(dk, ds, columns_of<kChannels>(q, my_channel));
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        ptx::pin(dv.x);
        arrive(shared.do_ring.empty[stage]);
        if constexpr (kDqAlone) {
          ptx::wgmma_wait<0>();
          ptx::pin(dk.x);
          arrive(shared.q_ring.empty[stage]);
          issue_dq(dq);
          ptx::wgmma_wait<0>();
        }
        ptx::pin(dq.x);
        if (left < steps) add_dq(dq);
        target = next_target;
        if constexpr (!kDqAlone) {
          ptx::wgmma_wait<0>();
          ptx::pin(dk.x);
          arrive(shared.q_ring.empty[stage]);
        }
      }
      if (steps) {
        Accumulator<kDqColumns> dq;
        shared.ds_ring.full[(n - 1) % kDsStages].wait((n - 1) / kDsStages % 2);
        issue_dq(dq);
        ptx::wgmma_wait<0>();
        ptx::pin(dq.x);
        shared.k_ring.empty[0].arrive();
        add_dq(dq);
      } else {
        shared.k_ring.empty[0].arrive(), arrive(shared.v_ring.empty[0]);
      }
      write(a.dv, w, my_keys, my_channel, dv, 1.f, -a.weight_exponent - e.do_, a.dim_v);
      write(a.dk, w, my_keys, my_channel, dk, a.scale, -a.weight_exponent - e.product - e.do_ - e.v - e.q, a.dim);
    }
  }

  // x scale 2^exponent, in two steps as the power alone may not be a float.
  __device__ void write(const Output& out, const BackwardWork& w, int my_keys, int my_channel,
                        Accumulator<kChannels>& x, float scale, int exponent, int columns) const {
    const float first = scale * exp2f(static_cast<float>(exponent / 2)),
                second = exp2f(static_cast<float>(exponent - exponent / 2));
#pragma unroll
    for (int i = 0; i < kChannels / 2; ++i) x.x[i] = x.x[i] * first * second;
    switch (out.element) {
      case Element::f32:
        return write_as<float>(out, w, my_keys, my_channel, x, columns);
      case Element::f16:
        return write_as<F16>(out, w, my_keys, my_channel, x, columns);
      default:
        return write_as<Bf16>(out, w, my_keys, my_channel, x, columns);
    }
  }

  template <class Type>
  __device__ void write_as(const Output& out, const BackwardWork& w, int my_keys, int my_channel,
                           const Accumulator<kChannels>& x, int columns) const {
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int j = w.first_key + my_keys + fragment_row() + 8 * row;
      store_row(out.row<Type>(w.batch, w.kv_head, static_cast<int64_t>(w.k.first) + j) + my_channel, j < w.k.tokens, x,
                row, columns - my_channel);
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
    ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
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
