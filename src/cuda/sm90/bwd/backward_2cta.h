// The backward pass at d = 160, 192, (192, 128) and 256: dq, dk, dv of 128 keys by a 2-CTA cluster. The algorithm is
// that of sm90/bwd/backward.h; its products are divided among the warpgroups of both thread blocks. In each thread
// block:
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
#include "cuda/sm90/bwd/query_rows.h"
#include "cuda/sm90/bwd/tiles.h"
#include "cuda/sm90/pipeline.h"

namespace octet::cuda::sm90 {

// dk or dv of 64 keys and a thread block's channels. Up to d = 192 a thread block that reads the caller's rows has its
// last channels in either half of a panel, so these have a product of their own (`kHalves`).
template <int Channels, bool kHalves>
struct KeySums {
  Accumulator<Channels> x;
  __device__ void zero() { x.zero(); }
  // Adds a b, for the first columns of b.
  template <class TileA, class TileB>
  __device__ void add(const TileA& a, const TileB& b, int) {
    mma_AB(x, a, columns_of<Channels>(b, 0));
  }
  __device__ void fence() { ptx::fence_operand(x.x); }
  // Calls f with each part and its first channel.
  template <class F>
  __device__ void parts(int channel, int, const F& f) {
    f(x, channel);
  }
};
template <int Channels>
struct KeySums<Channels, true> {
  static constexpr int kRest = Channels - kPanelColumns;
  Accumulator<kPanelColumns> x;
  Accumulator<kRest> rest;
  __device__ void zero() { x.zero(), rest.zero(); }
  // Adds a b, for the first panel of b and the columns of the second one from `column` on.
  template <class TileA, class TileB>
  __device__ void add(const TileA& a, const TileB& b, int column) {
    mma_AB(x, a, columns_of<kPanelColumns>(b, 0));
    auto second = columns_of<kRest>(b, kPanelColumns);
    second.data += column * sizeof(typename TileB::Element);
    mma_AB(rest, a, second);
  }
  __device__ void fence() { ptx::fence_operand(x.x), ptx::fence_operand(rest.x); }
  template <class F>
  __device__ void parts(int channel, int rest_channel, const F& f) {
    f(x, channel), f(rest, rest_channel);
  }
};

template <class T, class Dims, Sums sums, Bins bins>
struct Backward2Cta {
  static constexpr int Dim = Dims::kDim, DimV = Dims::kDimV;
  static constexpr int kTileDim = tile_dim(Dim);
  using Tile = BackwardTile<kTileDim>;
  static constexpr int kBlocks = 2;  // of a cluster
  static constexpr int kQueries = Tile::kQueries, kClusterKeys = Tile::kKeys, kKeys = kClusterKeys / kBlocks;
  // The channels of a thread block. Its half of a tile has them first and, up to d = 192, some of its peer's after them
  // (see repeated_column); the remote columns have all others.
  static constexpr int kChannels = Dim / kBlocks, kLocalColumns = kTileDim / kBlocks,
                       kRemoteColumns = Dim > 192 ? kLocalColumns : kPanelColumns;
  // The same of v and do. Where a panel of each half has all of their channels, no others are fetched.
  static constexpr int kChannelsV = DimV / kBlocks,
                       kLocalColumnsV = Dim <= 192 && kChannelsV <= kPanelColumns ? kPanelColumns : kLocalColumns;
  // The local columns of k and v come first, instead of the order of channels.
  static constexpr bool kLocalFirst = kRemoteColumns < kLocalColumns;
  // True: q, do, k and v may be the caller's, as these operands have no scale. Their panels are whole: up to d = 192
  // the first thread block has the first ones, the second the last ones from the last on, and both the one between.
  static constexpr bool kMayReadRows = std::is_same_v<T, Bf16> && may_read_rows(Dim);
  static constexpr bool kHalves = kMayReadRows && kChannels % kPanelColumns == kPanelColumns / 2;
  static constexpr int kConsumerThreads = 3 * kWarpgroup, kThreads = kConsumerThreads + kWarpgroup;
  static constexpr int kWarps = kWarpgroup / 32;
  static constexpr int kClearThreads = 64;  // that clear sums of dq
  enum NamedBarrier : int { kClearBarrier = 1 };
  using StageCounts = Stages2Cta<Dims>;
  static constexpr int kQStages = StageCounts::kQ, kDoStages = StageCounts::kDo, kRemoteStages = StageCounts::kRemote,
                       kPStages = StageCounts::kP, kDsStages = 2;
  static constexpr bool kAhead = Dim <= 192;  // registers allow the next s beside this one
  static constexpr int kDqColumns = kLocalColumns / 2, kDqNumbers = kQueries * kDqColumns;  // per warpgroup
  using Scheduler = KeyBlockScheduler<kQueries, kClusterKeys, bins>;
  using TileQ = SharedTile<T, kQueries, kTileDim, true>;
  using TileK = SharedTile<T, kKeys, kLocalColumns + kRemoteColumns, true>;
  using TileCluster = SharedTile<T, kClusterKeys, kTileDim, true>;  // the keys of both, as preprocessed
  using Local = SharedTile<T, kQueries, kLocalColumns, true>;       // columns of a TileQ or of a TileK
  using TileV = SharedTile<T, kKeys, kLocalColumnsV + kRemoteColumns, true>;
  using LocalDo = SharedTile<T, kQueries, kLocalColumnsV, true>;
  using Remote = SharedTile<T, kQueries, kRemoteColumns, true>;
  using TileP = SharedTile<T, kKeys, kQueries, true>;
  using Rows = QueryRows<kQueries>;
  static_assert(kKeys == kWarpgroupRows && kQueries == kWarpgroupRows);

  struct alignas(kSwizzleBytes) Shared {
    unsigned char k[TileK::kBytes], v[TileV::kBytes];
    unsigned char remote_k[Local::kBytes];  // the local columns of the peer's keys
    unsigned char q_local[kQStages][Local::kBytes], do_local[kDoStages][LocalDo::kBytes];
    unsigned char q_remote[kRemoteStages][Remote::kBytes], do_remote[kRemoteStages][Remote::kBytes];
    unsigned char p[kPStages][kBlocks][TileP::kBytes], ds[kDsStages][kBlocks][TileP::kBytes];
    Rows rows[kQStages];
    Pipeline<1> k_pipe, v_pipe;
    Pipeline<kRemoteStages> q_remote_pipe, do_remote_pipe;
    // The local columns; released by warpgroups 2 and 3 only: ds_pipe.full implies that warpgroup 1 has read them.
    Pipeline<kQStages> q_pipe;
    Pipeline<kDoStages> do_pipe;
    Barrier rows_empty[kQStages];
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
  // Memory is aligned by hand where there is room, else by its declaration.
  static constexpr bool kAlignsByHand = sizeof(Shared) + kSwizzleBytes <= kMostSharedBytes;
  static constexpr int kSharedBytes = sizeof(Shared) + (kAlignsByHand ? kSwizzleBytes : 0);
  static_assert(kSharedBytes <= kMostSharedBytes);

  const BackwardRowsParams& a;
  Shared& shared;
  const Scheduler scheduler{a};

  static __device__ int rank() { return static_cast<int>(ptx::cluster_rank()); }
  static __device__ int peer() { return rank() ^ 1; }
  // The column of k and v at which the local columns begin.
  static __device__ int local_column() { return kLocalFirst ? 0 : rank() * kLocalColumns; }
  // Returns the channel at which a panel begins of those that thread block `of_rank` has of the caller's `Channels`.
  template <int Channels>
  static __device__ int channel_of_panel(int of_rank, int panel) {
    const int column = panel * kPanelColumns;
    if constexpr (kLocalFirst) return of_rank ? Channels - kPanelColumns - column : column;
    return of_rank * kLocalColumns + column;
  }
  // Loads a tile of the first panels that `of_rank` has, of rows of the caller.
  template <int Channels, class Tile>
  static __device__ void load_rows(const Tile& tile, const CUtensorMap& map, int of_rank, int row, int head, int batch,
                                   Barrier& full) {
#pragma unroll
    for (int i = 0; i < Tile::kPanels; ++i)
      load(columns_of<kPanelColumns>(tile, i * kPanelColumns), map, channel_of_panel<Channels>(of_rank, i), row, head,
           batch, &full.word);
  }

  __device__ unsigned next_number(unsigned numbers_taken);
  __device__ void load_keys();
  __device__ void load_rows_of_keys(const KeyBlockInfo& w, bool is_k);

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
