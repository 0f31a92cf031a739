// o = softmax(scale q k^T) v and lse, for blocks of queries:
//
//   for each tile of keys, from the last to the first that the block sees:
//     s = q k^T;  p, l over the maximum m so far;  o = o + p v
//     where such a p would be too large: s again;  m, p, l by online softmax;  o = o rescale + p v
//   o = o / l;  lse = scale m + ln l
//
// One warp loads tiles through TMA. The warpgroups that compute hold 64 queries each and may take ping_pong: while one
// issues its products, another computes exponentials. Within a warpgroup, the product s of a tile runs together with
// the product p v of the tile before (FlashAttention-3, arXiv 2407.08608, algorithm 2).
//
// q and k are numbers of 16 bits, or quantized values of 8 with a scale for each query and each key: then s is a
// product of integers, logits are s times the scale of the key, and the scale of the query is part of the softmax's
// scale_log2.
//
// Where o is compensated (fragment/precision.h), v comes less a vector, which o gets back. With each 16 keys tensor
// cores truncate o towards 0; so half way through the tiles of a block o is sign-flipped: it becomes o - 2 a, a near o,
// and 2 a come back in the end. What is truncated in the second half has the other sign.
#pragma once
#include <type_traits>

#include "cuda/fragment/mask.h"
#include "cuda/fragment/output.h"
#include "cuda/fragment/precision.h"
#include "cuda/fragment/sign_flip.h"
#include "cuda/fragment/sinks.h"
#include "cuda/fragment/softmax.h"
#include "cuda/fragment/softmax_8bit.h"
#include "cuda/fragment/unmasked_row.h"
#include "cuda/ptx/grid.h"
#include "cuda/sm90/fwd/config.h"
#include "cuda/sm90/fwd/params.h"
#include "cuda/sm90/mma.h"
#include "cuda/sm90/pipeline.h"
#include "cuda/sm90/smem.h"

namespace octet::cuda::sm90 {

template <class Precision, class Dims>
struct Forward {
  using Tile = ForwardTile<Precision, Dims>;
  static constexpr int kRows = Tile::kWarpgroups * kWarpgroupRows, kKeys = Tile::kKeys;
  static constexpr int kThreads = (Tile::kWarpgroups + 1) * kWarpgroup;
  static constexpr int kConsumerThreads = Tile::kWarpgroups * kWarpgroup;
  static constexpr int kWarps = kWarpgroup / 32;
  static_assert(Tile::kWarpgroups * Tile::kRegisters + Tile::kProducerRegisters <=
                65536 / kThreads / 8 * 8 * (Tile::kWarpgroups + 1));

  static constexpr bool kQuantizedQk = kIntegerLogits<Precision>;
  template <int Rows>
  using OperandTile = std::conditional_t<kQuantizedQk, SharedTile8Bit<typename Precision::QkType, Rows, Dims::kDim>,
                                         SharedTile<typename Precision::QkType, Rows, Dims::kDim>>;

  // Some tiles along the diagonal are seen by none of a warpgroup's queries: it passes them over.
  static constexpr bool kSkips = kRows - kWarpgroupRows >= kKeys;

  // Of others it sees only the first half: then that is all that it computes. Where both kinds of tiles come in every
  // block, as at d = 128, twice the instructions cost what this gains.
  static constexpr bool kHalves = kSkips && !kQuantizedQk;

  // o of 16 bits leaves through the place that q had, where the next block's q has another.
  static constexpr bool kThroughQ = !kQuantizedQk && Tile::kQStages > 1;

  using TileQ = OperandTile<kRows>;
  using TileK = OperandTile<kKeys>;
  using TileV = SharedTile<typename Precision::PType, kKeys, Dims::kDimV>;

  // A compensated o is sign-flipped where shared memory has room for what is put aside, 16 bits of each number.
  static constexpr int kSavedOWords = kSavedWords<Dims::kDimV>,
                       kSavedBytes = kConsumerThreads * kSavedOWords * sizeof(uint4);
  static constexpr int kTileBytes = Tile::kQStages * TileQ::kBytes + Tile::kStages * (TileK::kBytes + TileV::kBytes);
  static constexpr bool kFlipsSigns =
      kCompensated<Precision> && kTileBytes + kSavedBytes + 2 * kSwizzleBytes <= kMostSharedBytes;

  // Tiles [first, last) of keys that any of some queries sees, the end of these keys, and those that all of them see.
  struct Keys {
    int first, last, end;
    KeyRange all;

    __device__ bool any() const { return first < last; }
  };

  // What the producer says about a block of queries.
  struct Block {
    TileInfo q_tile;
    Keys keys, of_warpgroup[Tile::kWarpgroups];
  };

  struct alignas(kSwizzleBytes) Shared {
    unsigned char q[Tile::kQStages][TileQ::kBytes];
    unsigned char k[Tile::kStages][TileK::kBytes];
    unsigned char v[Tile::kStages][TileV::kBytes];
    alignas(16) float k_scale[Tile::kStages][kQuantizedQk ? kKeys : 1];
    Pipeline<Tile::kQStages> q_pipe;
    Pipeline<Tile::kStages> k_pipe, v_pipe;
    Barrier cleared;
    Block block[Tile::kQStages];
    TileInfo saved_tile[Tile::kWarpgroups][kWarps];
    uint4 partial[kFlipsSigns ? kSavedBytes / sizeof(uint4) : 1];
  };
  static constexpr int kSharedBytes = sizeof(Shared) + kSwizzleBytes;  // dynamic shared memory starts at any 16 bytes

  // Named barriers, the first of one for each warpgroup that computes.
  static constexpr int kPingPongBarrier = 1, kVoteBarrier = kPingPongBarrier + Tile::kWarpgroups;

  const ForwardParams& a;
  Shared& shared;

  __device__ TileQ q(int stage) const { return {shared.q[stage]}; }
  __device__ TileK k(int stage) const { return {shared.k[stage]}; }
  __device__ TileV v(int stage) const { return {shared.v[stage]}; }

  // Of a sequence, among those of k: quantized values lie in whole tiles.
  __device__ int first_key_of(const TileInfo& q_tile) const {
    return kQuantizedQk && a.schedule.cu_seqlens_k ? (q_tile.k_first / kKeys + q_tile.sequence) * kKeys
                                                   : q_tile.k_first;
  }

  // Of `rows` queries from `query` on.
  __device__ Keys keys_of(const TileInfo& q_tile, int query, int rows) const {
    const int end = min(query + rows, q_tile.q_tokens) - 1;
    const KeyRange top = a.mask.keys_of(query, q_tile.q_tokens, q_tile.k_tokens);
    const KeyRange bottom = a.mask.keys_of(end, q_tile.q_tokens, q_tile.k_tokens);
    if (end < query || bottom.last <= top.first) return {0, 0, 0, {0, 0}};
    return {top.first / kKeys, (bottom.last + kKeys - 1) / kKeys, bottom.last, {bottom.first, top.last}};
  }

  __device__ void produce();
  __device__ void clear_rows(unsigned char* tile, int from, int to) const;

  // The first query of a sequence in arrays [batch, head, token].
  __device__ int64_t row_of(const TileInfo& q_tile) const {
    return (static_cast<int64_t>(q_tile.batch) * a.schedule.heads + q_tile.head) * a.schedule.q_tokens + q_tile.q_first;
  }

  __device__ RowValues softmax_scale_log2(const TileInfo& q_tile, int query) const;
  __device__ auto start_softmax(const TileInfo& q_tile, int query) const;

  // What the producer says about this block, kept by each warp for the time when its place may be another's.
  __device__ TileInfo& saved_tile(int warpgroup) const {
    return shared.saved_tile[warpgroup][threadIdx.x / 32 % kWarps];
  }
  __device__ void save_tile(const Block& block, int warpgroup) const;

  // Where a thread puts words of o partial, kWarpgroup from one to the next.
  __device__ uint4* partial(int warpgroup) const {
    return shared.partial + warpgroup * kSavedOWords * kWarpgroup + threadIdx.x % kWarpgroup;
  }

  // What v was reduced by, in the columns of this thread.
  struct SomeVMean {
    float2 x[Dims::kDimV / 8];
  };
  struct NoVMean {};
  using VMean = std::conditional_t<kCompensated<Precision>, SomeVMean, NoVMean>;
  static constexpr bool kVMeanEarly = Dims::kDimV <= 128;  // or no registers are left for it
  __device__ VMean v_mean_of(const TileInfo& q_tile) const {
    VMean v_mean;
    if constexpr (kCompensated<Precision>) {
      const int64_t kv = q_tile.batch * (a.schedule.heads / a.group) + q_tile.head / a.group;
#pragma unroll
      for (int i = 0; i < Dims::kDimV / 8; ++i)
        v_mean.x[i] = *reinterpret_cast<const float2*>(a.v_mean + kv * Dims::kDimV + 8 * i + fragment_column());
    }
    return v_mean;
  }

  // Where logits go: float sums stay where they are.
  static __device__ Accumulator<kKeys>& in_place(Accumulator<kKeys>& s, Accumulator<kKeys>&) { return s; }
  static __device__ Accumulator<kKeys>& in_place(Accumulator<kKeys, int>&, Accumulator<kKeys>& converted) {
    return converted;
  }

  __device__ void consume(int warpgroup);
  __device__ bool write(const TileInfo& q_tile, int query, const OnlineSoftmax& softmax, VMean& v_mean,
                        Accumulator<Dims::kDimV>& o, unsigned char* q, int warpgroup) const;
  __device__ void write_lse(const TileInfo& q_tile, int query, const RowValues& from, const RowValues& l,
                            const RowValues& of_mean) const;

  template <class T>
  __device__ bool write_as(const TileInfo& q_tile, int query, Accumulator<Dims::kDimV>& o, unsigned char* q,
                           int warpgroup) const;
  template <class T>
  __device__ bool write_to(const Output& to, const TileInfo& q_tile, int query, const Accumulator<Dims::kDimV>& o,
                           unsigned char* q, int warpgroup) const;

  __device__ void recompute_rows(const TileInfo& q_tile, int warpgroup) const;
};

}  // namespace octet::cuda::sm90
