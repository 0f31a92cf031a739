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
#include "cuda/sm90/bwd/dq_sums.h"
#include "cuda/sm90/bwd/epilogue.h"
#include "cuda/sm90/bwd/mask.h"
#include "cuda/sm90/bwd/tiles.h"
#include "cuda/sm90/pipeline.h"

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
  using TileCluster = SharedTile<T, kClusterKeys, Dim, true>;  // keys of both thread blocks, as params
  using Half = SharedTile<T, kQueries, kChannels, true>;       // of TileQ, or of TileK
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
    Pipeline<kStages> q_pipe,
        do_pipe;  // local; given back by the two warpgroups, as ds shows that the first has read them
    Barrier rows_empty[kStages];
    Pipeline<kPStages> p_pipe;  // what both thread blocks put, and have taken
    Pipeline<kDsStages> ds_pipe;
    Pipeline<1> tile_pipe;  // between the threads that load
    Pipeline<1> number_pipe;
    uint32_t number;  // of a block of keys, from the thread block that numbers_taken them
    // In turn. The next is written once v of the one before the last was given back, in the last step of that block, so
    // that nobody reads the third last.
    static constexpr int kTileSlots = 3;
    KeyBlockInfo key_block[kTileSlots];

    __device__ void init() {
      k_pipe.init(kConsumerThreads + kClearing), v_pipe.init(kWarps), q_remote_pipe.init(kWarps),
          do_remote_pipe.init(kWarps);
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

  __device__ unsigned next_number(unsigned draw);
  __device__ void load_keys();

  __device__ void clear_all(int thread);
  __device__ void load_queries();

  template <bool kFirstPart>
  __device__ void load_queries(const KeyBlockInfo& w, unsigned& n);
  template <int Stages>
  __device__ void put(const Operand<T, kQueries>& x, unsigned char (&tiles)[Stages][kBlocks][TileP::kBytes],
                      Pipeline<Stages>& ring, unsigned n);
  // All lanes of a warp are done with what both thread blocks left.
  static __device__ void release(Barrier& empty) {
    __syncwarp();
    if (threadIdx.x % 32 < kBlocks) ptx::arrive_at(ptx::at_rank(&empty, threadIdx.x % 32));
  }

  __device__ void compute_p_ds();
  __device__ void accumulate(int half);
};

}  // namespace octet::cuda::sm90
