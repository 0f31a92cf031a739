// The backward pass up to d = 128: dq, dk, dv for one block of keys of one kv head at a time (FlashAttention-2, arXiv
// 2307.08691, algorithm 2):
//
//   for each tile of queries that sees the block, for each head of the group:
//     p = exp(scale k q^T - lse)      ds = p (v do^T - delta)      both with one key per row
//     dv += p do    dk += ds q    dq(tile) += ds^T k
//
// As p and ds are transposed, they stay in registers as left operands of dv and dk. Only ds goes through shared memory,
// for dq, which sums over the keys of both warpgroups. Each warpgroup computes dq from the ds of the iteration before,
// so that the two need not meet. The warpgroups issue their products in turn (ping-pong), from dv of one iteration to
// dp of the next: while one computes exponentials, the products of the other run. dq is summed over blocks of keys by
// atomics in L2. In the producer warpgroup, one thread loads all operands, and three warps convert k and v of the next
// block and clear the sums of dq of a later head.
#pragma once
#include "cuda/fragment/dropout.h"
#include "cuda/ptx/bulk_store.h"
#include "cuda/ptx/grid.h"
#include "cuda/sm90/bwd/alibi.h"
#include "cuda/sm90/bwd/block_factors.h"
#include "cuda/sm90/bwd/convert_keys.h"
#include "cuda/sm90/bwd/dq_sums.h"
#include "cuda/sm90/bwd/epilogue.h"
#include "cuda/sm90/bwd/mask.h"
#include "cuda/sm90/bwd/mask_pipeline.h"
#include "cuda/sm90/bwd/query_rows.h"
#include "cuda/sm90/bwd/tiles.h"
#include "cuda/sm90/pipeline.h"

namespace octet::cuda::sm90 {

template <class T, int Dim, Sums sums, Bins bins, Extra extra>
struct Backward {
  static constexpr int kTileDim = tile_dim(Dim);
  using Tile = BackwardTile<kTileDim>;
  static constexpr int kQueries = Tile::kQueries, kKeys = Tile::kKeys;
  static constexpr int kWarpgroups = 2, kConsumerThreads = kWarpgroups * kWarpgroup,
                       kThreads = kConsumerThreads + kWarpgroup;
  static constexpr int kWarps = kBackwardWarps;
  static constexpr bool kAlibi = extra == Extra::alibi, kDrops = extra == Extra::dropout, kMasked = has_mask(extra);
  using Stages = BackwardStages<kTileDim, kMasked>;
  static constexpr int kStages = Stages::kStages, kDoStages = Stages::kDoStages, kDsStages = 2;
  // Prefetch distance: the next block is taken when this many iterations of the current one are left to load. That is
  // early enough to make its k and v ready, and late enough for all thread blocks to end together.
  static constexpr int kPrefetchDistance = 6, kKeyStages = 2;
  using Converter = KeyConverter<T, kKeys, kTileDim, kMasked>;
  // Named barriers: one among the warps that convert keys, and the first of one per consumer warpgroup: for their
  // turns, and among the warps of each once its products have read shared memory.
  enum NamedBarrier : int { kConverterBarrier = Converter::kBarrier, kPingPongBarrier = 2, kReadBarrier = 4 };
  // A warpgroup computes half of dq: 64 queries, and all channels or half of them.
  static constexpr bool kDqByQueries = kQueries > kWarpgroupRows;
  static constexpr int kDqColumns = kDqByQueries ? Dim : kTileDim / kWarpgroups;
  static constexpr int kDqNumbers = kWarpgroupRows * kDqColumns;

  // True: registers suffice to hold p in 16 bits beside s.
  static constexpr bool kEarlyP = kTileDim == 128;
  // True: no query of a block's first tile may see the second warpgroup's keys, which then passes the tile by. Later
  // iterations are not passed by, as they compute dq of the one before.
  static constexpr bool kPassesFirst = kQueries <= kWarpgroupRows;
  // True: what dropout keeps is found beside the products, which takes registers.
  static constexpr bool kEarlyKept = kEarlyP && bins == Bins::first;
  // True: factors are read from shared memory where they are needed, for want of registers.
  static constexpr bool kFactorsStay = kDrops && bins == Bins::further;
  // True: iterations need to know their head of the group.
  static constexpr bool kByHead = kAlibi || kDrops || kMasked;
  // True: an iteration waits for the next q before it adds to dq, as the atomics delay the loads that follow them.
  static constexpr bool kAwaitsNext = kTileDim == 128;
  using Scheduler = KeyBlockScheduler<kQueries, kKeys, bins>;
  using TileQ = SharedTile<T, kQueries, Dim>;
  using TileK = SharedTile<T, kKeys, Dim>;
  using TileDs = SharedTile<T, kKeys, kQueries>;

  using Rows = QueryRows<kQueries>;

  // The way of a warpgroup's rows of dk and dv to memory: through what no product of either warpgroup reads any more.
  // That is its panel of k and of v or, where these have one panel for both warpgroups, its panel of the last ds.
  static constexpr bool kSendsFromDs = kDqByQueries;
  template <class Type>
  using TileSent = SharedTile<Type, kWarpgroupRows, Dim>;

  // True: q and do may be the caller's, as these operands have no scale.
  static constexpr bool kMayReadRows = std::is_same_v<T, Bf16> && may_read_rows(Dim);

  using Mask = MaskPipeline<std::conditional_t<extra == Extra::f16_mask, F16, Bf16>, kQueries>;
  template <int>
  struct Nothing {};
  struct alignas(kSwizzleBytes) Shared : std::conditional_t<kMasked, typename Mask::Tiles, Nothing<0>>,
                                         std::conditional_t<kMasked, typename Mask::Pipes, Nothing<1>> {
    alignas(kSwizzleBytes) unsigned char k[kKeyStages][TileK::kBytes], v[kKeyStages][TileK::kBytes];
    unsigned char q[kStages][TileQ::kBytes], do_[kDoStages][TileQ::kBytes];
    unsigned char ds[kDsStages][TileDs::kBytes];
    Rows rows[kStages];
    Pipeline<kKeyStages> k_pipe, v_pipe;
    Barrier k_rows_full[kKeyStages], v_rows_full[kKeyStages];  // the caller's rows of k and v have arrived
    Pipeline<kStages> q_pipe;
    Pipeline<kDoStages> do_pipe;
    Barrier rows_empty[kStages];  // all threads arrive, as each reads its columns
    Pipeline<kDsStages> ds_pipe;
    static constexpr int kTileSlots = 3;
    Pipeline<kTileSlots> tile_pipe;
    KeyBlockInfo key_block[kTileSlots];
    BlockFactors factors[kTileSlots];

    // `readers`: the threads that release a slot of `key_block`.
    __device__ void init(int readers) {
      k_pipe.init(kConsumerThreads), v_pipe.init(kWarps), q_pipe.init(kWarps), do_pipe.init(kWarps);
      for (int i = 0; i < kKeyStages; ++i) k_rows_full[i].init(1), v_rows_full[i].init(1);
      tile_pipe.init(readers);
      for (Barrier& empty : rows_empty) empty.init(kConsumerThreads);
      if constexpr (kMasked) Mask::Pipes::init();
      for (int i = 0; i < kDsStages; ++i) ds_pipe.full[i].init(kWarps), ds_pipe.empty[i].init(kWarps);
    }
  };
  static constexpr int kSharedBytes = sizeof(Shared);
  static_assert(kSharedBytes <= kMostSharedBytes);

  const BackwardRowsParams& a;
  Shared& shared;
  const Scheduler scheduler{a};

  __device__ void convert_keys(int thread);
  __device__ void fetch_tiles(unsigned tile_index, int stage);
  __device__ Barrier& rows_full(bool is_k, int stage) const {
    return (is_k ? shared.k_rows_full : shared.v_rows_full)[stage];
  }
  static __device__ int rows_phase_bit(bool is_k, int stage) { return 2 * stage + is_k; }

  __device__ void fetch_rows(bool is_k, const KeyBlockInfo& w, int stage) const;
  __device__ void convert_rows(int thread, bool is_k, unsigned tile_index, int stage, uint32_t& phases);

  __device__ void produce();
  __device__ void load_tiles(const KeyBlockInfo& w, unsigned tile_index, unsigned& n);

  __device__ void next_tile(unsigned tile_index);
  __device__ void set_factors(int slot);
  // Returns the first query of a warpgroup's part of a tile of dq.
  static __device__ int dq_row(int warpgroup) { return kDqByQueries ? warpgroup * kWarpgroupRows : 0; }
  __device__ void add(const Target& target, int warpgroup, const Accumulator<kDqColumns>& x, int thread) const;

  static __device__ void ping_pong_wait(int warpgroup) {
    ptx::barrier_sync(kPingPongBarrier + warpgroup, kConsumerThreads);
  }
  static __device__ void ping_pong_arrive(int warpgroup) {
    ptx::barrier_arrive(kPingPongBarrier + 1 - warpgroup, kConsumerThreads);
  }

  // Returns the head of the group that the next iteration has.
  __device__ int next_head(int head) const { return head + 1 == a.heads / a.kv_heads ? 0 : head + 1; }

  // The elements of P that dropout keeps, in a tile of queries.
  using Kept = KeptElements<kQueries, RowTokens::keys>;
  __device__ void find_kept(const KeyBlockInfo& w, int head, int first_row, int query, Kept& kept) const {
    const int sequence = a.k_blocks.cu_seqlens ? w.k.index : w.batch;
    kept.find(a.dropout.stream(sequence, w.kv_head * (a.heads / a.kv_heads) + head), a.dropout.dropped,
              w.first_key + first_row + fragment_row(), query, a.dropout.places_of(sequence));
  }
  // Converts P for the product with do.
  __device__ static void convert_p(const Accumulator<kQueries>& s, const Kept& kept, Operand<T, kQueries>& p) {
    convert(s, p);
    if constexpr (kDrops) drop(p, kept);
  }

  __device__ void consume(int warpgroup);
  template <class Type>
  __device__ void send_keys(int warpgroup, const KeyBlockInfo& w, const Accumulator<Dim>& dk,
                            const Accumulator<Dim>& dv, int key_stage, int ds_stage, int offset) const;
  __device__ void release_sent(int key_stage, int ds_stage);
  __device__ void write(int warpgroup, const KeyBlockInfo& w, Accumulator<Dim>& dk, Accumulator<Dim>& dv, int key_stage,
                        int iterations, unsigned n, int offset) const;
  template <bool kUsual>
  __device__ void take_P(Accumulator<kQueries>& s, float factor, const ColumnValues<kQueries>& columns,
                         const Rows& rows, const KeyBlockInfo& w, int key, int head, int warpgroup, unsigned n) const;
  __device__ void fetch_mask(const KeyBlockInfo& w, const MBlock& at, int group, unsigned n) const;
  __device__ void put_ds(const Operand<T, kQueries>& ds, int warpgroup, unsigned n, int offset);
  __device__ Target pass_first(int warpgroup, unsigned n, float dq_sums_scale, int offset);
  template <bool kUsual>
  __device__ void compute(int warpgroup, const KeyBlockInfo& w, const BlockFactors& f, int key_stage, bool sent,
                          unsigned& n);
};

}  // namespace octet::cuda::sm90
