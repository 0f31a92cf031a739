// The 8-bit forward pass: o = softmax(scale q k^T) v and lse with 8-bit operands, for tiles of queries.
//
//   for each tile of keys, from the last to the first that the tile of queries sees:
//     s = q k^T in int32 or float32
//     e4m3:  p with the row's stale scale;  o = o + p v
//            where such a p would be too large: repeat s;  p with a new scale;  o = o rescale + p v
//     uint8: p with the scale of the row's largest p in the tile;  r = p v;  o = o + r times the scale of p
//   o = o / l;  lse
//
// One producer thread loads the tiles by TMA. Each consumer warpgroup computes 64 queries. Within a warpgroup, the
// product s of a tile runs together with the product p v of the tile before.
//
// Tensor cores add e4m3 products with 13 bits. Every kTilesPerSum tiles, o is therefore added to a partial accumulator
// in shared memory and restarts from 0. The sum l of the rounded P is column dim_v of o, where it loses what o loses:
// the channels of v are followed by a row of ones. lse is computed from seven further columns, each the sum of a part
// of the keys, which lose less.
#pragma once
#include <type_traits>

#include "cuda/fragment/mask.h"
#include "cuda/fragment/output.h"
#include "cuda/fragment/precision.h"
#include "cuda/fragment/sinks.h"
#include "cuda/fragment/softmax_8bit.h"
#include "cuda/fragment/unmasked_row.h"
#include "cuda/operands/quantize/quantize.h"
#include "cuda/ptx/grid.h"
#include "cuda/sm90/fwd/config.h"
#include "cuda/sm90/fwd/params.h"
#include "cuda/sm90/mma.h"
#include "cuda/sm90/pipeline.h"
#include "cuda/sm90/smem.h"

namespace octet::cuda::sm90 {

template <class Precision, class Dims>
struct Forward8Bit {
  using Tile = Forward8BitTile<Precision, Dims>;
  static constexpr int kRows = Tile::kWarpgroups * kWarpgroupRows, kKeys = Tile::kKeys;
  static constexpr int kThreads = (Tile::kWarpgroups + 1) * kWarpgroup;
  static constexpr int kConsumerThreads = Tile::kWarpgroups * kWarpgroup;
  static constexpr int kWarps = kWarpgroup / 32;
  enum NamedBarrier : int { kVoteBarrier = 1 };  // the first of one per consumer warpgroup
  static_assert(Tile::kWarpgroups * Tile::kRegisters + Tile::kProducerRegisters <=
                65536 / kThreads / 8 * 8 * (Tile::kWarpgroups + 1));

  static constexpr int kSumRows = Precision::kSumRounded ? 8 : 0;  // the rows of ones after the channels of v
  static constexpr int kColumns = Dims::kDimV + kSumRows;
  static constexpr int kWords = kColumns / 8;  // float4 of o in a thread
  static constexpr int kTilesPerSum = 8;
  static constexpr bool kScaled = Precision::kScaled;  // true: P has a scale for each query and tile
  static constexpr KeyScales kKeyScales = Precision::kKeyScales;
  using Softmax = std::conditional_t<kScaled, TileScaleSoftmax, SharedScaleSoftmax<Precision>>;
  using Sums = Accumulator<kKeys, typename Precision::Sum>;
  using TileQ = SharedTile8Bit<typename Precision::QkType, kRows, Dims::kDim>;
  using TileK = SharedTile8Bit<typename Precision::QkType, kKeys, Dims::kDim>;
  using TileV = SharedTile8Bit<typename Precision::VType, kColumns, kKeys, Dims::kDimV>;

  struct alignas(kSwizzleBytes) Shared {
    alignas(kSwizzleBytes) unsigned char q[Tile::kQStages][TileQ::kBytes];
    alignas(kSwizzleBytes) unsigned char k[k8BitStages][TileK::kBytes];
    alignas(kSwizzleBytes) unsigned char v[k8BitStages][TileV::kBytes];
    alignas(16) float k_scale[k8BitStages][kKeyScales == KeyScales::groups ? kGroupScales<kKeys> : kKeys];
    alignas(16) float v_scale[k8BitStages][2][kScaled ? kKeys : 4];  // logarithm, inverse
    Pipeline<Tile::kQStages> q_pipe;
    Pipeline<k8BitStages> kv_pipe;  // a stage has a tile of k, and the tile of v that was issued before it
    float4 partial[kScaled ? 1 : Tile::kWarpgroups][kScaled ? 1 : kWords][kScaled ? 1 : kWarpgroup];
    Barrier ping_pong[Tile::kWarpgroups][kWarps];
    TileInfo q_tile[Tile::kQStages + 1];  // one more than stages of q: a tile's is read until its o is written
  };
  static constexpr int kSharedBytes = sizeof(Shared) + kSwizzleBytes;  // dynamic shared memory starts at any 16 bytes
  static_assert(TileK::kBytes % TileK::kSwizzlePeriod == 0 && TileV::kBytes % TileV::kSwizzlePeriod == 0);

  const Forward8BitParams& a;
  Shared& shared;

  __device__ TileQ q(int stage) const { return {shared.q[stage]}; }
  __device__ TileK k(int stage) const { return {shared.k[stage]}; }
  __device__ TileV v(int stage) const { return {shared.v[stage]}; }

  // The tiles of keys that a range of queries sees.
  struct SeenTiles {
    int first, last;              // tiles [first, last) that any of the queries sees
    int whole_first, whole_last;  // tiles that all of them see as a whole

    __device__ bool any() const { return first < last; }
  };
  __device__ Interval keys_of(const TileInfo& q_tile, int query) const {
    return a.mask.keys_of(query, q_tile.q_tokens, q_tile.k_tokens);
  }
  __device__ SeenTiles tiles_of(const TileInfo& q_tile, int query, int rows) const {
    const int end = min(query + rows, end_of(q_tile));
    const auto [any, all] = a.mask.keys_of_all(query, end, q_tile.q_tokens, q_tile.k_tokens);
    if (end <= query || any.last <= any.first) return {};
    const Interval tiles = any.tiles(kKeys);
    return {tiles.first, tiles.last, (all.first + kKeys - 1) / kKeys, all.last / kKeys};
  }
  // Returns the first query after a tile of queries.
  __device__ static int end_of(const TileInfo& q_tile) { return min(q_tile.q_start + q_tile.rows, q_tile.q_tokens); }

  __device__ void write_ones() const;
  // Returns the first key of a sequence, where each sequence starts at a multiple of kLaidOutKeys.
  __device__ int first_key_of(const TileInfo& q_tile) const {
    constexpr int kPadding = kLaidOutKeys<Precision, Dims>;
    return a.scheduler.cu_seqlens_k ? (q_tile.k_first / kPadding + q_tile.sequence) * kPadding : 0;
  }

  __device__ void produce();
  static __device__ void add(Accumulator<kColumns>& o, const Accumulator<kColumns, int>& r, const RowValues& p_scale);

  // This thread's part of the partial accumulator, and its sums with o.
  __device__ float4& partial(int warpgroup, int word) const {
    return shared.partial[warpgroup][word][threadIdx.x % kWarpgroup];
  }
  __device__ float4 with_partial(int warpgroup, int word, const Accumulator<kColumns>& o, const RowValues& by) const;
  __device__ void add_partial(int warpgroup, Accumulator<kColumns>& o, const RowValues& by) const;
  __device__ void store_partial(int warpgroup, const Accumulator<kColumns>& o, const RowValues& by, bool first) const;

  // Waits for all but the latest `Pending` products; d must be the result of one that is waited for.
  template <int Pending, class D>
  static __device__ void wait_products(D& d) {
    ptx::wgmma_wait<Pending>();
    ptx::fence_operand(d.x);
  }

  // The positions of a consumer warpgroup in its pipelines.
  struct Positions {
    PipelineState<k8BitStages> kv;
    int q;               // stage of q
    uint32_t ping_pong;  // phase; warpgroup 0 does not wait for its first one
  };

  __device__ void consume(int warpgroup);
  // Ping-pong around the exponentials: each warp signals the warp of the next warpgroup on the same warp scheduler.
  __device__ void ping_pong_arrive(int warpgroup) const {
    if constexpr (Tile::kPingPong) {
      __syncwarp();
      if (threadIdx.x % 32 == 0)
        shared.ping_pong[(warpgroup + 1) % Tile::kWarpgroups][threadIdx.x / 32 % kWarps].arrive();
    }
  }
  // Waits, and returns a 0; instructions that use it cannot be moved ahead of the wait.
  __device__ float ping_pong_wait(int warpgroup, Positions& at) const {
    if constexpr (Tile::kPingPong) {
      at.ping_pong ^= 1;
      return shared.ping_pong[warpgroup][threadIdx.x / 32 % kWarps].wait_for_zero(at.ping_pong ^ 1);
    }
    return 0.f;
  }
  __device__ void wait_kv(const Positions& at) const { shared.kv_pipe.full[at.kv.stage].wait(at.kv.phase); }
  __device__ void release_kv(Positions& at) const { shared.kv_pipe.empty[at.kv.stage].arrive(), at.kv.advance(); }

  // Releases a stage that this warpgroup does not need.
  __device__ void skip(Positions& at) const { wait_kv(at), release_kv(at); }

  // Issues s = q k^T.
  __device__ void multiply_k(int warpgroup, const Positions& at, int stage, Sums& s) const {
    ptx::wgmma_fence();
    mma_ABt_8bit(s, q(at.q), warpgroup * kWarpgroupRows, k(stage));
    ptx::wgmma_commit();
  }
  // Issues d (+)= p v.
  template <class D, class P>
  __device__ void multiply_v(const Positions& at, const P& p, D& d, bool accumulate) const {
    ptx::wgmma_fence();
    mma_ABt_8bit(d, p, v(at.kv.stage), accumulate);
    ptx::wgmma_commit();
  }

  __device__ auto group_scales(const Positions& at, int tile) const;
  __device__ void take_logits(const Positions& at, const Softmax& softmax, const Sums& s, Accumulator<kKeys>& x) const;
  // mask() sets the logits of keys that a query does not see to -inf. Where keys have scales, P of these keys is set to
  // 0 too, as a thread group that is seen in part may have a scale that is NaN.
  static constexpr bool kMasksP = kKeyScales != KeyScales::none;
  __device__ void mask(int warpgroup, const TileInfo& q_tile, const SeenTiles& tiles, int tile, Accumulator<kKeys>& x,
                       float masked = -INFINITY) const;
  __device__ static bool needs_mask(const SeenTiles& tiles, int tile) {
    return tile < tiles.whole_first || tile >= tiles.whole_last;
  }
  // Returns the first of this thread's two queries.
  __device__ static int query_of(const TileInfo& q_tile, int warpgroup) {
    return q_tile.q_start + warpgroup * kWarpgroupRows + fragment_row();
  }

  __device__ void attend(int warpgroup, const TileInfo& q_tile, const SeenTiles& tiles, Positions& at, Softmax& softmax,
                         Accumulator<kColumns>& o) const;
  __device__ void attend_scaled(int warpgroup, const TileInfo& q_tile, const SeenTiles& tiles, Positions& at,
                                Softmax& softmax, Accumulator<kColumns>& o) const;

  __device__ RowValues softmax_scale_log2(const TileInfo& q_tile, int query) const;

  __device__ void write(const TileInfo& q_tile, int query, const Softmax& softmax,
                        const Accumulator<kColumns>& sums) const;
  template <class T>
  __device__ void write_as(const TileInfo& q_tile, int query, const RowValues& lse, Accumulator<Dims::kDimV>& o) const;
  __device__ void recompute_rows(const TileInfo& q_tile, int query) const;
};

}  // namespace octet::cuda::sm90
