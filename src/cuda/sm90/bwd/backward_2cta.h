// The backward pass at d = 256: dq, dk, dv of 128 keys by a 2-CTA cluster. The algorithm is that of
// sm90/bwd/backward.h; its products are divided among the warpgroups of both thread blocks. In each thread block:
//
//   one warpgroup, for 64 keys and all channels:
//     s = k q^T    p = exp(scale s - lse)    dp = v do^T    ds = p (dp - delta)
//   two warpgroups, for half of the channels:
//     dv += p do    dk += ds q    each for 64 of the 128 keys
//     dq(tile) += ds^T k          each for half of these channels, summed over all 128 keys
//
// p and ds are put into the shared memory of both thread blocks. dq, most of the traffic to L2, is thus summed over 128
// keys before it is added there. The first warpgroup is an iteration ahead of the others, so that none waits for the
// products of another. Two warps of the producer warpgroup clear the sums of dq of a later head.
#pragma once
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/grid.h"
#include "cuda/sm90/bwd/dq_sums.h"
#include "cuda/sm90/bwd/epilogue.h"
#include "cuda/sm90/bwd/mask.h"
#include "cuda/sm90/bwd/tiles.h"
#include "cuda/sm90/pipeline.h"

namespace octet::cuda::sm90 {

template <class T, int Dim, Sums sums, Parts parts>
struct Backward2Cta {
  static constexpr int kTileDim = tile_dim(Dim);
  using Tile = BackwardTile<kTileDim>;
  static constexpr int kBlocks = 2;  // of a cluster
  static constexpr int kQueries = Tile::kQueries, kClusterKeys = Tile::kKeys, kKeys = kClusterKeys / kBlocks;
  // The channels of a thread block, and the columns of tiles that hold them.
  static constexpr int kChannels = Dim / kBlocks, kColumns = kTileDim / kBlocks;
  static constexpr int kConsumerThreads = 3 * kWarpgroup, kThreads = kConsumerThreads + kWarpgroup;
  static constexpr int kWarps = kWarpgroup / 32;
  static constexpr int kClearThreads = 64;  // that clear sums of dq
  enum NamedBarrier : int { kClearBarrier = 1 };
  static constexpr int kStages = BackwardStages<kTileDim>::kStages, kPStages = 1, kDsStages = 2;
  static constexpr int kDqColumns = kColumns / 2, kDqNumbers = kQueries * kDqColumns;  // per warpgroup
  using Scheduler = KeyBlockScheduler<kQueries, kClusterKeys, parts>;
  using TileQ = SharedTile<T, kQueries, kTileDim, true>;
  using TileK = SharedTile<T, kKeys, kTileDim, true>;
  using TileCluster = SharedTile<T, kClusterKeys, kTileDim, true>;  // the keys of both, as preprocessed
  using Half = SharedTile<T, kQueries, kChannels, true>;            // half of a TileQ or of a TileK
  using TileP = SharedTile<T, kKeys, kQueries, true>;
  using Rows = QueryRows<kQueries>;
  static_assert(kKeys == kWarpgroupRows && kQueries == kWarpgroupRows);

  // Local: the channels of this thread block. Remote: the channels of its peer.
  struct alignas(kSwizzleBytes) Shared {
    unsigned char k[TileK::kBytes], v[TileK::kBytes];
    unsigned char remote_k[Half::kBytes];  // the local channels of the peer's keys
    unsigned char q_local[kStages][Half::kBytes], do_local[kStages][Half::kBytes];
    unsigned char q_remote[Half::kBytes], do_remote[Half::kBytes];
    unsigned char p[kPStages][kBlocks][TileP::kBytes], ds[kDsStages][kBlocks][TileP::kBytes];
    Rows rows[kStages];
    Pipeline<1> k_pipe, v_pipe, q_remote_pipe, do_remote_pipe;
    // The local channels; released by warpgroups 2 and 3 only: ds_pipe.full implies that warpgroup 1 has read them.
    Pipeline<kStages> q_pipe, do_pipe;
    Barrier rows_empty[kStages];
    Pipeline<kPStages> p_pipe;  // full: both thread blocks have put p; empty: both have read it
    Pipeline<kDsStages> ds_pipe;
    Pipeline<1> tile_pipe;    // from the thread that loads k and v to the one that loads q and do
    Pipeline<1> number_pipe;  // from thread block 0 to thread block 1
    uint32_t number;          // the block of keys that thread block 0 has taken
    // The slots are used in turn. A slot is written once v of the block before was released, in the last iteration of
    // that block, so that no thread still reads the block that had the slot.
    static constexpr int kTileSlots = 3;
    KeyBlockInfo key_block[kTileSlots];

    __device__ void init() {
      k_pipe.init(kConsumerThreads + kClearThreads), v_pipe.init(kWarps), q_remote_pipe.init(kWarps),
          do_remote_pipe.init(kWarps);
      q_pipe.init(2 * kWarps), do_pipe.init(2 * kWarps), tile_pipe.init(1), number_pipe.init(1);
      for (Barrier& empty : rows_empty) empty.init(kConsumerThreads);
      init(p_pipe), init(ds_pipe);
    }
    template <int Stages>
    __device__ void init(Pipeline<Stages>& pipe) {
      for (int i = 0; i < Stages; ++i) pipe.full[i].init(kWarps), pipe.empty[i].init(kBlocks * 2 * kWarps);
    }
  };
  static constexpr int kSharedBytes = sizeof(Shared) + kSwizzleBytes;
  static_assert(kSharedBytes <= kMostSharedBytes);

  const BackwardParams& a;
  Shared& shared;
  const Scheduler scheduler{a};

  static __device__ int rank() { return static_cast<int>(ptx::cluster_rank()); }
  static __device__ int peer() { return rank() ^ 1; }

  __device__ unsigned next_number(unsigned numbers_taken);
  __device__ void load_keys();

  __device__ void clear_all(int thread);
  __device__ void load_queries();
  __device__ void load_queries(const KeyBlockInfo& w, unsigned& n);
  template <int Stages>
  __device__ void put(const Operand<T, kQueries>& x, unsigned char (&tiles)[Stages][kBlocks][TileP::kBytes],
                      Pipeline<Stages>& pipe, unsigned n);
  // Releases a stage in both thread blocks, for all lanes of a warp.
  static __device__ void release(Barrier& empty) {
    __syncwarp();
    if (threadIdx.x % 32 < kBlocks) ptx::arrive_at(ptx::at_rank(&empty, threadIdx.x % 32));
  }

  __device__ void compute_p_ds();
  __device__ void accumulate(int half);
};

}  // namespace octet::cuda::sm90
