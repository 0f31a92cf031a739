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
#include "cuda/sm90/bwd/dq_sums.h"
#include "cuda/sm90/bwd/epilogue.h"
#include "cuda/sm90/bwd/mask.h"
#include "cuda/sm90/bwd/tiles.h"
#include "cuda/sm90/pipeline.h"

namespace octet::cuda::sm90 {

template <class T, int Dim, Sums sums>
struct Backward {
  using Tile = BackwardTile<Dim>;
  static constexpr int kQueries = Tile::kQueries, kKeys = Tile::kKeys;
  static constexpr int kWarpgroups = 2, kConsumerThreads = kWarpgroups * kWarpgroup,
                       kThreads = kConsumerThreads + kWarpgroup;
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
    KeyBlockInfo key_block[kTileSlots];

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

  __device__ void convert_keys(int thread);
  __device__ void fetch_tiles(KeyBlockInfo& w, int stage) const;
  __device__ Barrier& rows_full(bool is_k, int stage) const {
    return (is_k ? shared.k_rows_full : shared.v_rows_full)[stage];
  }
  static __device__ int rows_phase_bit(bool is_k, int stage) { return 2 * stage + is_k; }

  __device__ void fetch_rows(bool is_k, const KeyBlockInfo& w, int stage) const;
  __device__ void convert_rows(int thread, bool is_k, KeyBlockInfo& w, int stage, uint32_t& phases) const;

  __device__ void produce();
  template <bool kFirstPart>
  __device__ void load_tiles(const KeyBlockInfo& w, unsigned tile_index, unsigned& n);

  __device__ void next_tile(unsigned tile_index);
  // The query that a warpgroup's part of a tile of dq begins with.
  static __device__ int dq_row(int warpgroup) { return kDqByQueries ? warpgroup * kWarpgroupRows : 0; }
  __device__ void add(const Target& target, int warpgroup, const Accumulator<kDqColumns>& x, int thread) const;

  static __device__ void ping_pong_wait(int warpgroup) {
    ptx::barrier_sync(kPingPongBarrier + warpgroup, kConsumerThreads);
  }
  static __device__ void ping_pong_arrive(int warpgroup) {
    ptx::barrier_arrive(kPingPongBarrier + 1 - warpgroup, kConsumerThreads);
  }

  __device__ void consume(int warpgroup);
  template <bool kUsual>
  __device__ void compute(int warpgroup, const KeyBlockInfo& w, const Exponents& e, int key_stage, unsigned& n,
                          Accumulator<Dim>& dk, Accumulator<Dim>& dv);
};

}  // namespace octet::cuda::sm90
