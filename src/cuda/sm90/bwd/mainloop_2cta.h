// dq, dk, dv at head dim 256: a pair of thread blocks, a cluster, has 128 keys. The loop of sm90/bwd/mainloop.h, its
// products divided:
//
//   of each thread block, for 64 keys and all channels
//     one warpgroup         s = k q^T    p = exp(scale s - lse)    dp = v do^T    ds = p (dp - delta)
//   of each thread block, for all 128 keys and half of the channels
//     two, for 64 keys each        dv += p do    dk += ds q
//     and half of these channels   dq(tile) += ds^T k
//
// p and ds are left in the shared memory of both. So what is added to dq in L2, the most that goes there, are sums over
// 128 keys. The first warpgroup is a step ahead of the others, so none waits for the products of another. Two warps of
// the warpgroup that loads clear sums of a later head.
#pragma once
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/grid.h"
#include "cuda/sm90/bwd/epilogue.h"

namespace octet::cuda::sm90 {

template <class T, int Dim, Sums sums>
struct Backward2Cta {
  using Tile = BackwardTile<Dim>;
  static constexpr int kBlocks = 2;  // of a cluster
  static constexpr int kQueries = Tile::kQueries, kClusterKeys = Tile::kKeys, kKeys = kClusterKeys / kBlocks;
  static constexpr int kChannels = Dim / kBlocks;
  static constexpr int kConsumerThreads = 3 * kWarpgroup, kThreads = kConsumerThreads + kWarpgroup;
  static constexpr int kWarps = kWarpgroup / 32;
  static constexpr int kClearing = 64, kBarrier = 1;  // threads that clear sums of dq, and their named barrier
  static constexpr int kStages = Tile::kStages, kPStages = 1, kDsStages = 2;
  static constexpr int kDqColumns = kChannels / 2, kDqNumbers = kQueries * kDqColumns;  // of a warpgroup
  using Schedule = KeyBlockScheduler<kQueries, kClusterKeys>;
  using TileQ = SharedTile<T, kQueries, Dim, true>;
  using TileK = SharedTile<T, kKeys, Dim, true>;
  using TileCluster = SharedTile<T, kClusterKeys, Dim, true>;   // keys of both thread blocks, as params
  using Half = SharedTile<T, kQueries, kChannels, true>;  // of TileQ, or of TileK
  using TileP = SharedTile<T, kKeys, kQueries, true>;
  using Rows = QueryRows<kQueries>;
  static_assert(kKeys == kWarpgroupRows && kQueries == kWarpgroupRows);

  // Near: of this thread block's channels. Far: of the peer's.
  struct alignas(kSwizzleBytes) Shared {
    unsigned char k[TileK::kBytes], v[TileK::kBytes];
    unsigned char remote_k[Half::kBytes];  // local channels of the peer thread block's keys
    unsigned char q_local[kStages][Half::kBytes], do_local[kStages][Half::kBytes];
    unsigned char q_remote[Half::kBytes], do_remote[Half::kBytes];
    unsigned char p[kPStages][kBlocks][TileP::kBytes], ds[kDsStages][kBlocks][TileP::kBytes];
    Rows rows[kStages];
    Pipeline<1> k_pipe, v_pipe, q_remote_pipe, do_remote_pipe;
    Pipeline<kStages> q_pipe, do_pipe;  // local; given back by the two warpgroups, as ds shows that the first has read them
    Barrier rows_empty[kStages];
    Pipeline<kPStages> p_pipe;  // what both thread blocks put, and have taken
    Pipeline<kDsStages> ds_pipe;
    Pipeline<1> tile_pipe;  // between the threads that load
    Pipeline<1> number_pipe;
    uint32_t number;  // of a block of keys, from the thread block that numbers_taken them
    // In turn. The next is written once v of the one before the last was given back, in the last step of that block, so
    // that nobody reads the third last.
    static constexpr int kTileSlots = 3;
    KeyBlockInfo work[kTileSlots];

    __device__ void init() {
      k_pipe.init(kConsumerThreads + kClearing), v_pipe.init(kWarps), q_remote_pipe.init(kWarps), do_remote_pipe.init(kWarps);
      q_pipe.init(2 * kWarps), do_pipe.init(2 * kWarps), tile_pipe.init(1), number_pipe.init(1);
      for (Barrier& empty : rows_empty) empty.init(kConsumerThreads);
      init(p_pipe), init(ds_pipe);
    }
    template <int Stages>
    __device__ void init(Pipeline<Stages>& ring) {
      for (int i = 0; i < Stages; ++i) ring.full[i].init(kWarps), ring.empty[i].init(kBlocks * 2 * kWarps);
    }
  };
  static constexpr int kSharedBytes = sizeof(Shared) + kSwizzleBytes;
  static_assert(kSharedBytes <= kMostSharedBytes);

  const BackwardParams& a;
  Shared& shared;
  const Schedule schedule{a};

  static __device__ int rank() { return static_cast<int>(ptx::cluster_rank()); }
  static __device__ int peer() { return rank() ^ 1; }

  // The next block of keys: the first thread block numbers_taken it and tells the peer.
  __device__ unsigned next_number(unsigned draw) {
    if (rank() == 0) {
      const unsigned number = atomicAdd(a.counter, 1u);
      shared.number_pipe.empty[0].wait(draw % 2 ^ 1);
      ptx::store_at(ptx::at_rank(&shared.number, 1), number, ptx::at_rank(&shared.number_pipe.full[0], 1));
      return number;
    }
    shared.number_pipe.full[0].arrive_expecting(sizeof(shared.number));
    shared.number_pipe.full[0].wait(draw % 2);
    const unsigned number = *static_cast<volatile uint32_t*>(&shared.number);
    ptx::arrive_at(ptx::at_rank(&shared.number_pipe.empty[0], 0));
    return number;
  }

  // Draws blocks of keys, each taken once for each part of its queries, and fetches k and v.
  __device__ void load_keys() {
    unsigned tile_index = 0, numbers_taken = 0;
    for (;;) {
      KeyBlockInfo& w = shared.work[tile_index % Shared::kTileSlots];
      const KeyBlockInfo& last = shared.work[(tile_index + Shared::kTileSlots - 1) % Shared::kTileSlots];
      const bool again = tile_index > 0 && schedule.next_part(last, w);
      while (!again) {
        schedule.find(next_number(numbers_taken++), w);
        if (!w.valid() || w.k.index >= 0) break;  // not past the last block of packed sequences
      }
      const uint32_t empty = tile_index % 2 ^ 1;
      shared.tile_pipe.full[0].arrive();
      if (!w.valid()) {
        shared.k_pipe.empty[0].wait(empty);
        shared.k_pipe.full[0].arrive();
        return;
      }
      const int64_t tile = (static_cast<int64_t>(w.batch) * a.kv_heads + w.kv_head) * a.k_blocks.count + w.block;
      const auto fetch_panels = [&](unsigned char* to, const unsigned char* tiles, int of_rank, int first, int panels,
                                    Pipeline<1>& ring) {
        const unsigned char* const from = tiles + tile * TileCluster::kBytes + of_rank * TileK::kPanelBytes;
        for (int panel = 0; panel < panels; ++panel)
          fetch(to + panel * TileK::kPanelBytes, from + (first + panel) * TileCluster::kPanelBytes, TileK::kPanelBytes,
                ring.full[0]);
      };
      shared.v_pipe.empty[0].wait(empty);
      shared.v_pipe.full[0].arrive_expecting(TileK::kBytes);
      fetch_panels(shared.v, a.v, rank(), 0, TileK::kPanels, shared.v_pipe);
      await_zeros(a, w, kBlocks * a.k_blocks.count);
      shared.k_pipe.empty[0].wait(empty);
      shared.k_pipe.full[0].arrive_expecting(TileK::kBytes + Half::kBytes);
      fetch_panels(shared.k, a.k, rank(), 0, TileK::kPanels, shared.k_pipe);
      fetch_panels(shared.remote_k, a.k, peer(), rank() * Half::kPanels, Half::kPanels, shared.k_pipe);
      // A block is drawn late, once all tiles of the last are fetched, so that all blocks end together.
      shared.tile_pipe.empty[0].wait(tile_index % 2);
      ++tile_index;
    }
  }

  // Clears sums of dq of later heads, a part with each block of keys.
  __device__ void clear_all(int thread) {
    for (unsigned tile_index = 0;; ++tile_index) {
      shared.k_pipe.full[0].wait_asleep(tile_index % 2);
      const KeyBlockInfo& w = shared.work[tile_index % Shared::kTileSlots];
      if (!w.valid()) return;
      const int part = kBlocks * w.block + rank();
      clear_ahead<kQueries * Dim, kClearing>(a, w, part, kBlocks * a.k_blocks.count, thread, kBarrier);
      shared.k_pipe.empty[0].arrive();
    }
  }

  // Fetches q and do, those of a block's first step before k of the last was given back; in the order in which their
  // places become free.
  __device__ void load_queries() {
    unsigned n = 0;  // steps
    for (unsigned tile_index = 0;; ++tile_index) {
      shared.tile_pipe.full[0].wait(tile_index % 2);
      const KeyBlockInfo& w = shared.work[tile_index % Shared::kTileSlots];
      if (!w.valid()) return;
      if (w.part == 0)
        load_queries<true>(w, n);
      else
        load_queries<false>(w, n);
      shared.tile_pipe.empty[0].arrive();
    }
  }

  template <bool kFirstPart>
  __device__ void load_queries(const KeyBlockInfo& w, unsigned& n) {
    const int group = a.heads / a.kv_heads;
    MBlock m_block{w.tiles.start, 0};
    for (int left = group * w.tiles.count(); left; --left, ++n, m_block.advance(w.tiles, group)) {
      const int64_t tile = schedule.q_tile(w, m_block, group);
      const auto fetch_half = [&](unsigned char* to, const unsigned char* tiles, int half, Barrier& full,
                                  uint32_t more = 0) {
        full.arrive_expecting(Half::kBytes + more);
        fetch(to, tiles + tile * TileQ::kBytes + half * Half::kBytes, Half::kBytes, full);
      };
      const int s = n % kStages;
      const uint32_t empty = n / kStages % 2 ^ 1;
      shared.q_pipe.empty[s].wait(empty);
      shared.rows_empty[s].wait(empty);
      fetch_half(shared.q_local[s], a.q, rank(), shared.q_pipe.full[s], sizeof(Rows));
      fetch(&shared.rows[s], schedule.template rows<Rows, kFirstPart>(w, tile), sizeof(Rows), shared.q_pipe.full[s]);
      shared.q_remote_pipe.empty[0].wait(n % 2 ^ 1);
      fetch_half(shared.q_remote, a.q, peer(), shared.q_remote_pipe.full[0]);
      shared.do_pipe.empty[s].wait(empty);
      fetch_half(shared.do_local[s], a.do_, rank(), shared.do_pipe.full[s]);
      shared.do_remote_pipe.empty[0].wait(n % 2 ^ 1);
      fetch_half(shared.do_remote, a.do_, peer(), shared.do_remote_pipe.full[0]);
    }
  }

  // Leaves p or ds in both thread blocks.
  template <int Stages>
  __device__ void put(const Operand<T, kQueries>& x, unsigned char (&tiles)[Stages][kBlocks][TileP::kBytes],
                        Pipeline<Stages>& ring, unsigned n) {
    const int stage = n % Stages, me = rank();  // in no register between steps
    unsigned char* const tile = tiles[stage][ptx::opaque(me)];
    ring.empty[stage].wait_for_cluster(n / Stages % 2 ^ 1);
    store(x, TileP{tile}, 0);
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      constexpr uint32_t kBytes = TileP::kBytes / kWarps;  // this warp's rows
      unsigned char* const mine = tile + threadIdx.x % kWarpgroup / 32 * kBytes;
      ring.full[stage].arrive_expecting(kBytes);  // from the peer
      ptx::copy_to(ptx::at_rank(mine, me ^ 1), mine, kBytes, ptx::at_rank(&ring.full[stage], me ^ 1));
    }
  }
  // All lanes of a warp are done with what both thread blocks left.
  static __device__ void release(Barrier& empty) {
    __syncwarp();
    if (threadIdx.x % 32 < kBlocks) ptx::arrive_at(ptx::at_rank(&empty, threadIdx.x % 32));
  }

  // p and ds.
  __device__ void compute_p_ds() {
    unsigned n = 0;  // steps before this one, of all blocks: where each pipeline stands
    const int group = a.heads / a.kv_heads;
    const TileK k{shared.k}, v{shared.v};
    const int me = rank(), local = me * kChannels, remote = (me ^ 1) * kChannels;
    for (unsigned tile_index = 0;; ++tile_index) {
      shared.k_pipe.full[0].wait(tile_index % 2);
      const KeyBlockInfo& w = shared.work[tile_index % Shared::kTileSlots];
      if (!w.valid()) break;
      const Exponents& e = schedule.exponents(w);
      const float scale_log2e = a.scale * 1.44269504f * exp2f(static_cast<float>(-e.q - e.k));
      const float product_scale = exp2f(static_cast<float>(e.product));
      const int steps = group * w.tiles.count();
      const UnmaskedSteps unmasked(a, w, w.first_key + me * kKeys, kKeys, kQueries, group);
      shared.v_pipe.full[0].wait(tile_index % 2);
      for (int left = steps; left; --left, ++n) {
        const int stage = n % kStages;
        const uint32_t phase = n / kStages % 2;
        const Rows& rows = shared.rows[stage];
        Accumulator<kQueries> s, dp;
        Operand<T, kQueries> x;
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
        ColumnValues<kQueries> columns(rows.lse);
        ptx::wgmma_wait<1>();
        ptx::fence_operand(s.x);
        arrive_as_warp(shared.q_remote_pipe.empty[0]);
#pragma unroll
        for (int i = 0; i < kQueries / 2; ++i) s.x[i] = ptx::exp2(__fmaf_rn(s.x[i], scale_log2e, -columns.of(i)));
        if (!unmasked.has(left)) mask_P(a, s, w, w.first_key + rank() * kKeys, rows.first);
        convert(s, x);
        put(x, shared.p, shared.p_pipe, n);
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
      if (!steps) arrive_as_warp(shared.v_pipe.empty[0]);
      shared.k_pipe.empty[0].arrive();
    }
  }

  // dv and dk of 64 keys, dq of 64 channels.
  __device__ void accumulate(int half) {
    unsigned n = 0;
    const int group = a.heads / a.kv_heads, channel = rank() * kChannels;
    const auto k = columns_of<kDqColumns>(TileK{shared.k}, channel + half * kDqColumns);
    const auto remote_k = columns_of<kDqColumns>(Half{shared.remote_k}, half * kDqColumns);
    for (unsigned tile_index = 0;; ++tile_index) {
      shared.k_pipe.full[0].wait(tile_index % 2);
      const KeyBlockInfo& w = shared.work[tile_index % Shared::kTileSlots];
      if (!w.valid()) break;
      const Exponents& e = schedule.exponents(w);
      const int steps = group * w.tiles.count();
      // Known before the first product: what is read after the last is waited for.
      const int dv_exponent = ptx::opaque(-a.weight_exponent - e.do_);
      const int dk_exponent = ptx::opaque(dv_exponent - e.product - e.v - e.q);
      const float dq_scale = ptx::opaque(exp2f(static_cast<float>(e.dq)));
      Accumulator<kChannels> dk, dv;
      dk.zero(), dv.zero();
      for (int left = steps; left; --left, ++n) {
        const int stage = n % kStages, p_stage = n % kPStages, ds_stage = n % kDsStages;
        const uint32_t phase = n / kStages % 2;
        auto& ds = shared.ds[ds_stage];
        Accumulator<kDqColumns> dq;
        shared.do_pipe.full[stage].wait(phase);
        shared.p_pipe.full[p_stage].wait(n / kPStages % 2);
        ptx::wgmma_fence();
        mma_AB(dv, TileP{shared.p[p_stage][half]}, Half{shared.do_local[stage]});
        ptx::wgmma_commit();
        shared.q_pipe.full[stage].wait(phase);
        const Target target = target_of<sums>(shared.rows[stage], 0, e.dq_sums_unit);
        shared.rows_empty[stage].arrive();
        shared.ds_pipe.full[ds_stage].wait(n / kDsStages % 2);
        ptx::wgmma_fence();
        mma_AtB(dq, TileP{ds[rank()]}, 0, k, 0);
        mma_AtB(dq, TileP{ds[peer()]}, 0, remote_k, 0, true);
        ptx::wgmma_commit();
        ptx::wgmma_fence();
        mma_AB(dk, TileP{ds[half]}, Half{shared.q_local[stage]});
        ptx::wgmma_commit();
        ptx::wgmma_wait<2>();
        ptx::fence_operand(dv.x);
        arrive_as_warp(shared.do_pipe.empty[stage]);
        release(shared.p_pipe.empty[p_stage]);
        ptx::wgmma_wait<1>();
        ptx::fence_operand(dq.x);
        if (sums == Sums::floats && dq_scale != 1.f) dq.scale(dq_scale);
        const int64_t start = ((static_cast<int64_t>(target.tile) * kBlocks + rank()) * 2 + half) * kDqNumbers;
        add_to_sums<Rows, sums, kSumsAtOnce<Dim, sums>>(a, target, start, 0, dq, threadIdx.x % kWarpgroup);
        ptx::wgmma_wait<0>();
        ptx::fence_operand(dk.x);
        release(shared.ds_pipe.empty[ds_stage]);
        arrive_as_warp(shared.q_pipe.empty[stage]);
      }
      shared.k_pipe.empty[0].arrive();
      const int key = w.first_key + half * kKeys;
      write_keys(a.dv, w, key, channel, dv, 1.f, dv_exponent, a.dim_v);
      write_keys(a.dk, w, key, channel, dk, a.scale, dk_exponent, a.dim);
    }
  }
};

template <class T, int Dim, Sums sums>
__global__ void __cluster_dims__(Backward2Cta<T, Dim, sums>::kBlocks)
    __launch_bounds__(Backward2Cta<T, Dim, sums>::kThreads, 1)
        backward_2cta(const __grid_constant__ BackwardParams arguments) {
  using Kernel = Backward2Cta<T, Dim, sums>;
  extern __shared__ unsigned char memory[];
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory + (-base & (kSwizzleBytes - 1)));
  Kernel kernel{arguments, shared};
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
    shared.init();
    publish_barriers();
  }
  ptx::cluster_sync();
  ptx::griddepcontrol_wait();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    ptx::reg_dealloc<k2CtaProducerRegisters>();
    if (threadIdx.x == 0) kernel.load_keys();
    if (threadIdx.x == 32) kernel.load_queries();
    if (threadIdx.x >= 64) kernel.clear_all(threadIdx.x - 64);
  } else if (warpgroup == 1) {
    ptx::reg_dealloc<k2CtaPRegisters>();
    kernel.compute_p_ds();
  } else {
    ptx::reg_alloc<k2CtaGradientRegisters>();
    kernel.accumulate(warpgroup - 2);
  }
  ptx::cluster_sync();  // nobody leaves while the peer may still arrive here
}

}  // namespace octet::cuda::sm90
