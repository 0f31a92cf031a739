// dq, dk, dv for blocks of keys, one block and kv head at a time (FlashAttention-2, arXiv 2307.08691, algorithm 2):
//
//   for each head of the group, for each tile of queries that sees the block:
//     p = exp(scale k q^T - lse)      ds = p (v do^T - delta)      both with a key in each row
//     dv += p do    dk += ds q    dq(tile) += ds^T k
//
// Transposed, p and ds stay in registers as left operands of dv and dk; only ds goes through shared memory, for dq.
// Each of two warpgroups holds 64 keys; they share the work of dq. Sums of dq over blocks of keys happen in L2.
#pragma once
#include <cuda/atomic>

#include "cuda/sm90/backward_arguments.h"
#include "cuda/sm90/config.h"
#include "cuda/tile/fragment.h"
#include "cuda/tile/ring.h"
#include "cuda/tile/shared.h"

namespace octet::cuda::sm90 {

template <class T, int Dim, Order order>
struct Backward {
  static constexpr int kQueries = BackwardTile<Dim>::kQueries, kKeys = kBackwardKeys;
  static constexpr int kWarpgroups = 2, kReaders = kWarpgroups * kWarpgroup, kThreads = kReaders + kWarpgroup;
  // dq of a step: 64 x 64 numbers for each warpgroup, by queries or by channels.
  static constexpr int kDqRows = kWarpgroupRows, kDqColumns = kQueries * Dim / kWarpgroups / kDqRows;
  static constexpr int kDqFloats = kQueries * Dim / kWarpgroups;

  using TileQ = SharedTile<T, kQueries, Dim>;
  using TileK = SharedTile<T, kKeys, Dim>;
  using TileDs = SharedTile<T, kKeys, kQueries>;

  struct Work {
    int batch, kv_head, block;  // block: of the head, -1: nothing is left
    int first_key;              // within the sequence
    Blocks::Sequence q, k;
    int first, last;  // tiles of queries that see the block
  };

  struct alignas(kSwizzleBytes) Shared {
    unsigned char k[TileK::kBytes], k_smooth[TileK::kBytes], v[TileK::kBytes];
    unsigned char q[kStages][TileQ::kBytes], do_[kStages][TileQ::kBytes];
    unsigned char ds[2][TileDs::kBytes];
    float dq[kWarpgroups][kDqFloats];
    float rows[kStages][2][kQueries];  // lse, delta
    Ring<1> keys;
    Ring<kStages> q_ring, do_ring;
    Work work;
    unsigned* turn[kWarpgroups];  // where the sum under way will be counted, or null
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

  // Blocks of keys in ascending order, across the kv heads of a section: under a causal mask the first is the longest.
  __device__ Work work_at(unsigned number) const {
    const unsigned blocks = a.k_blocks.count, all = a.batch * a.kv_heads;
    if (number >= blocks * all) return {.block = -1};
    const unsigned first_head = number / (blocks * a.section) * a.section;
    const unsigned width = min(static_cast<unsigned>(a.section), all - first_head);
    const unsigned rest = number - first_head * blocks, head = first_head + rest % width;
    Work w{static_cast<int>(head / a.kv_heads), static_cast<int>(head % a.kv_heads), static_cast<int>(rest / width)};
    w.k = a.k_blocks.sequence_of(w.block);
    if (w.k.index < 0) return w;
    w.first_key = (w.block - w.k.first_block) * kKeys;
    w.q = a.q_blocks.cu_seqlens ? a.q_blocks.sequence(w.k.index) : a.q_blocks.sequence_of(0);
    int first = 0, last = w.q.tokens;
    if (a.mask.windowed) {
      const int shift = a.mask.bottom_right ? w.k.tokens - w.q.tokens : 0;
      const int last_key = min(w.first_key + kKeys, w.k.tokens) - 1;
      first = max(w.first_key - shift - a.mask.right, 0);
      last = min(last_key - shift + a.mask.left + 1, w.q.tokens);
    }
    w.first = first / kQueries;
    w.last = max((last + kQueries - 1) / kQueries, w.first);
    return w;
  }

  __device__ int64_t q_tile(const Work& w, int head, int tile) const {
    return (static_cast<int64_t>(w.batch) * a.heads + head) * a.q_blocks.count + w.q.first_block + tile;
  }

  __device__ void load_all() {
    namespace ptx = ::cuda::ptx;
    const auto fetch = [](void* to, const void* from, uint32_t bytes, Barrier& full) {
      ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, to, from, bytes, &full.word);
    };
    RingPosition<1> at;
    RingPosition<kStages> stage;
    const int group = a.heads / a.kv_heads;
    for (unsigned number = blockIdx.x;; number = gridDim.x + atomicAdd(a.counter, 1u)) {
      const Work w = work_at(number);
      if (w.block >= 0 && w.k.index < 0) continue;  // past the last block of packed sequences
      shared.keys.empty[0].wait(at.parity ^ 1);
      shared.work = w;
      Barrier& keys = shared.keys.full[0];
      if (w.block < 0) {
        keys.arrive();
        return;
      }
      const int64_t k_tile = (static_cast<int64_t>(w.batch) * a.kv_heads + w.kv_head) * a.k_blocks.count + w.block;
      keys.arrive_expecting(3 * TileK::kBytes);
      fetch(shared.k, a.k + k_tile * TileK::kBytes, TileK::kBytes, keys);
      fetch(shared.v, a.v + k_tile * TileK::kBytes, TileK::kBytes, keys);
      fetch(shared.k_smooth, a.k_smooth + k_tile * TileK::kBytes, TileK::kBytes, keys);
      at.advance();
      for (int head = w.kv_head * group; head < (w.kv_head + 1) * group; ++head)
        for (int tile = w.first; tile < w.last; ++tile, stage.advance()) {
          const int64_t q = q_tile(w, head, tile);
          const int s = stage.stage;
          shared.q_ring.empty[s].wait(stage.parity ^ 1);
          shared.q_ring.full[s].arrive_expecting(TileQ::kBytes + sizeof shared.rows[s]);
          fetch(shared.q[s], a.q + q * TileQ::kBytes, TileQ::kBytes, shared.q_ring.full[s]);
          fetch(shared.rows[s], a.rows + q * 2 * kQueries, sizeof shared.rows[s], shared.q_ring.full[s]);
          shared.do_ring.empty[s].wait(stage.parity ^ 1);
          shared.do_ring.full[s].arrive_expecting(TileQ::kBytes);
          fetch(shared.do_[s], a.do_ + q * TileQ::kBytes, TileQ::kBytes, shared.do_ring.full[s]);
        }
    }
  }

  // Deterministic sums of dq: blocks of keys add to a tile in ascending order. A block waits only for blocks with a
  // lower number of work, which are under way or done.
  static __device__ void await_turn(unsigned* turn, unsigned number) {
    ::cuda::atomic_ref<unsigned, ::cuda::thread_scope_device> count(*turn);
    while (count.load(::cuda::memory_order_acquire) != number) __nanosleep(20);
  }

  // How many blocks of keys before this one add to a tile of queries.
  __device__ unsigned order_of(const Work& w, int tile) const {
    return w.first_key / kKeys - a.mask.keys_of(tile * kQueries, w.q.tokens, w.k.tokens).first / kKeys;
  }

  // p of pairs that do not see each other becomes 0. Rows are keys, columns queries.
  __device__ void mask(Accumulator<kQueries>& p, const Work& w, int key, int query) const {
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

  __device__ bool sees_all(const Work& w, int query) const {
    if (w.first_key + kKeys > w.k.tokens) return false;
    if (!a.mask.windowed) return true;
    const int shift = a.mask.bottom_right ? w.k.tokens - w.q.tokens : 0;
    const int least = w.first_key - shift - (query + kQueries - 1), most = w.first_key + kKeys - 1 - shift - query;
    return least >= -a.mask.left && most <= a.mask.right;
  }

  __device__ void compute_all(int warpgroup) {
    namespace bulk = ::cuda::ptx;
    RingPosition<1> at;
    RingPosition<kStages> stage;
    const int group = a.heads / a.kv_heads, my_keys = warpgroup * kWarpgroupRows;
    const TileK k{shared.k}, k_smooth{shared.k_smooth}, v{shared.v};
    const bool leader = threadIdx.x % kWarpgroup == 0;
    const float product_scale = exp2f(static_cast<float>(a.product_exponent));
    int step = 0;
    for (;; at.advance()) {
      shared.keys.full[0].wait(at.parity);
      const Work& w = shared.work;  // there until the keys are given back
      if (w.block < 0) break;
      const Exponents& e = a.exponents[w.batch * a.kv_heads + w.kv_head];
      const float scale_log2e = a.scale * 1.44269504f * exp2f(static_cast<float>(-e.q - e.k));
      Accumulator<Dim> dk, dv;
      dk.zero(), dv.zero();
      for (int head = w.kv_head * group; head < (w.kv_head + 1) * group; ++head)
        for (int tile = w.first; tile < w.last; ++tile, stage.advance(), step ^= 1) {
          const TileQ q{shared.q[stage.stage]}, do_{shared.do_[stage.stage]};
          const TileDs ds_tile{shared.ds[step]};
          Accumulator<kQueries> s, dp;
          Operand<T, kQueries> p, ds;
          shared.q_ring.full[stage.stage].wait(stage.parity);
          ptx::wgmma_fence();
          mm_ABt(s, k, my_keys, q, false);
          ptx::wgmma_commit();
          shared.do_ring.full[stage.stage].wait(stage.parity);
          ptx::wgmma_fence();
          mm_ABt(dp, v, my_keys, do_, false);
          ptx::wgmma_commit();
          ptx::wgmma_wait<1>();
          ptx::pin(s.x);
          ColumnValues columns(shared.rows[stage.stage][0]);
#pragma unroll
          for (int i = 0; i < kQueries / 2; ++i) s.x[i] = ptx::exp2(__fmaf_rn(s.x[i], scale_log2e, -columns.of(i)));
          if (!sees_all(w, tile * kQueries)) mask(s, w, w.first_key + my_keys + fragment_row(), tile * kQueries);
          convert(s, p);
          ptx::wgmma_wait<0>();
          ptx::pin(dp.x);
          columns.read(shared.rows[stage.stage][1]);
#pragma unroll
          for (int i = 0; i < kQueries / 2; ++i) dp.x[i] = s.x[i] * __fmaf_rn(dp.x[i], product_scale, -columns.of(i));
          convert(dp, ds);
          store(ds, ds_tile, my_keys);
          bulk::fence_proxy_async(bulk::space_shared);
          ptx::wgmma_fence();
          mma_AB(dv, p, do_);
          ptx::wgmma_commit();
          // Both halves of ds are there. It also means that both warpgroups are done with the ds of the step before.
          ptx::barrier_sync(1, kReaders);
          Accumulator<kDqColumns> dq;
          ptx::wgmma_fence();
          if constexpr (kQueries == kWarpgroupRows)
            mm_AtB(dq, ds_tile, 0, k_smooth, warpgroup);
          else
            mm_AtB(dq, ds_tile, warpgroup, k_smooth, 0);
          ptx::wgmma_commit();
          mma_AB(dk, ds, q);
          ptx::wgmma_commit();
          ptx::wgmma_wait<1>();
          ptx::pin(dq.x), ptx::pin(dv.x);
          shared.do_ring.empty[stage.stage].arrive();
          // dq to L2: its former numbers have left shared memory, then the new ones enter it.
          if (leader) await_sum(warpgroup);
          ptx::barrier_sync(2 + warpgroup, kWarpgroup);
          float4* const staged = reinterpret_cast<float4*>(shared.dq[warpgroup]) + threadIdx.x % kWarpgroup;
#pragma unroll
          for (int i = 0; i < kDqColumns / 8; ++i)
            staged[i * kWarpgroup] = {dq.x[4 * i], dq.x[4 * i + 1], dq.x[4 * i + 2], dq.x[4 * i + 3]};
          bulk::fence_proxy_async(bulk::space_shared);
          ptx::barrier_sync(2 + warpgroup, kWarpgroup);
          if (leader) {
            const int64_t at_tile = q_tile(w, head, tile) * kWarpgroups + warpgroup;
            if constexpr (order == Order::ascending) {
              shared.turn[warpgroup] = a.turns + at_tile;
              await_turn(a.turns + at_tile, order_of(w, tile));
            }
            bulk::cp_reduce_async_bulk(bulk::space_global, bulk::space_shared, bulk::op_add, a.dq + at_tile * kDqFloats,
                                       shared.dq[warpgroup], kDqFloats * sizeof(float));
            bulk::cp_async_bulk_commit_group();
          }
          ptx::wgmma_wait<0>();
          ptx::pin(dk.x);
          shared.q_ring.empty[stage.stage].arrive();
        }
      if (leader) await_sum(warpgroup);
      write(a.dv, w, my_keys, dv, 1.f, -a.weight_exponent - e.do_, a.dim_v);
      write(a.dk, w, my_keys, dk, a.scale, -a.weight_exponent - a.product_exponent - e.do_ - e.v - e.q, a.dim);
      shared.keys.empty[0].arrive();
    }
    if (leader) bulk::cp_async_bulk_wait_group(bulk::n32_t<0>());
  }

  // Until shared memory may be written again; in turns, until the sum is in dq.
  __device__ void await_sum(int warpgroup) {
    namespace bulk = ::cuda::ptx;
    if constexpr (order == Order::any) {
      bulk::cp_async_bulk_wait_group_read(bulk::n32_t<0>());
    } else {
      bulk::cp_async_bulk_wait_group(bulk::n32_t<0>());
      unsigned*& turn = shared.turn[warpgroup];
      if (turn)
        ::cuda::atomic_ref<unsigned, ::cuda::thread_scope_device>(*turn).fetch_add(1u, ::cuda::memory_order_release);
      turn = nullptr;
    }
  }

  // x scale 2^exponent, in two steps as the power alone may not be a float.
  __device__ void write(const Output& out, const Work& w, int my_keys, Accumulator<Dim>& x, float scale, int exponent,
                        int columns) const {
    const float first = scale * exp2f(static_cast<float>(exponent / 2)),
                second = exp2f(static_cast<float>(exponent - exponent / 2));
#pragma unroll
    for (int i = 0; i < Dim / 2; ++i) x.x[i] = x.x[i] * first * second;
    switch (out.element) {
      case Element::f32:
        return write_as<float>(out, w, my_keys, x, columns);
      case Element::f16:
        return write_as<F16>(out, w, my_keys, x, columns);
      default:
        return write_as<Bf16>(out, w, my_keys, x, columns);
    }
  }

  template <class Type>
  __device__ void write_as(const Output& out, const Work& w, int my_keys, const Accumulator<Dim>& x,
                           int columns) const {
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int j = w.first_key + my_keys + fragment_row() + 8 * row;
      store_row(out.row<Type>(w.batch, w.kv_head, static_cast<int64_t>(w.k.first) + j), j < w.k.tokens, x, row,
                columns);
    }
  }
};

template <class T, int Dim, Order order>
__global__ void __launch_bounds__(Backward<T, Dim, order>::kThreads, 1)
    backward(const __grid_constant__ BackwardArguments arguments) {
  using Kernel = Backward<T, Dim, order>;
  extern __shared__ unsigned char memory[];
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory + (-base & (kSwizzleBytes - 1)));
  Kernel kernel{arguments, shared};
  if (threadIdx.x == 0) {
    for (unsigned*& turn : shared.turn) turn = nullptr;
    shared.keys.init(Kernel::kReaders);
    shared.q_ring.init(Kernel::kReaders);
    shared.do_ring.init(Kernel::kReaders);
    ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
  }
  __syncthreads();
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
