// o = softmax(scale q k^T) v and lse with operands of 8 bits, for blocks of queries:
//
//   for each tile of keys, from the last to the first that the block sees:
//     s = q k^T in int32 or float32
//     e4m3:  p over the scale that its row has;  o = o + p v
//            where a p would be too large: s again;  p over a new scale;  o = o rescale + p v
//     uint8: p on the scale of its largest in the tile;  r = p v;  o = o + r times the scale of p
//   o = o / l;  lse
//
// One warp loads tiles through TMA. The warpgroups that compute hold 64 queries each. Within one, the product s of a
// tile runs together with the product p v of the tile before.
//
// Tensor cores add e4m3 products in 13 bits, so every kTilesPerSum tiles o is put aside, to shared memory, and starts
// anew. The sum l of rounded P is column dim_v of o, where it loses what o loses: below the channels of v lies a
// row of ones. lse takes it from seven more, each of a part of the keys.
#pragma once
#include <type_traits>

#include "cuda/fragment/mask.h"
#include "cuda/fragment/output.h"
#include "cuda/fragment/precision.h"
#include "cuda/fragment/sinks.h"
#include "cuda/fragment/softmax_8bit.h"
#include "cuda/fragment/unmasked_row.h"
#include "cuda/preprocess/quantize.h"
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
  static constexpr int kVoteBarrier = 1;  // the first of one for each warpgroup
  static_assert(Tile::kWarpgroups * Tile::kRegisters + Tile::kProducerRegisters <=
                65536 / kThreads / 8 * 8 * (Tile::kWarpgroups + 1));

  static constexpr int kSumRows = Precision::kSumRounded ? 8 : 0;
  static constexpr int kColumns = Dims::kDimV + kSumRows;
  static constexpr int kWords = kColumns / 8;  // float4 of o in a thread
  static constexpr int kTilesPerSum = 8;
  static constexpr bool kScaled = Precision::kScaled;  // whether quantized values of P have scales of their own
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
    Pipeline<k8BitStages> kv_pipe;  // a tile of k, and of v the one before
    float4 partial[kScaled ? 1 : Tile::kWarpgroups][kScaled ? 1 : kWords][kScaled ? 1 : kWarpgroup];  // of o
    Barrier ping_pong[Tile::kWarpgroups][kWarps];
    TileInfo q_tile[Tile::kQStages + 1];  // in ping_pong: one is read until o is written
  };
  static constexpr int kSharedBytes = sizeof(Shared) + kSwizzleBytes;  // dynamic shared memory starts at any 16 bytes
  static_assert(TileK::kBytes % TileK::kSwizzlePeriod == 0 && TileV::kBytes % TileV::kSwizzlePeriod == 0);

  const Forward8BitParams& a;
  Shared& shared;

  __device__ TileQ q(int stage) const { return {shared.q[stage]}; }
  __device__ TileK k(int stage) const { return {shared.k[stage]}; }
  __device__ TileV v(int stage) const { return {shared.v[stage]}; }

  // Tiles [first, last) of keys that any of `rows` queries from `query` on sees, and those that all of them see whole.
  struct Keys {
    int first, last;
    int whole_first, whole_last;

    __device__ bool any() const { return first < last; }
  };
  __device__ KeyRange keys_of(const TileInfo& q_tile, int query) const {
    return a.mask.keys_of(query, q_tile.q_tokens, q_tile.k_tokens);
  }
  __device__ Keys keys_of(const TileInfo& q_tile, int query, int rows) const {
    const int end = min(query + rows, end_of(q_tile)) - 1;
    const KeyRange top = keys_of(q_tile, query), bottom = keys_of(q_tile, end);
    if (end < query || bottom.last <= top.first) return {};
    return {top.first / kKeys, (bottom.last + kKeys - 1) / kKeys, (bottom.first + kKeys - 1) / kKeys, top.last / kKeys};
  }
  // The first query after a block.
  __device__ static int end_of(const TileInfo& q_tile) { return min(q_tile.q_start + q_tile.rows, q_tile.q_tokens); }

  __device__ void write_ones() const;
  // Of a sequence, among quantized values in whole tiles.
  __device__ int first_key_of(const TileInfo& q_tile) const {
    constexpr int kScale = kLaidOutKeys<Precision, Dims>;
    return a.schedule.cu_seqlens_k ? (q_tile.k_first / kScale + q_tile.sequence) * kScale : 0;
  }

  __device__ void produce();
  static __device__ void add(Accumulator<kColumns>& o, const Accumulator<kColumns, int>& r, const RowValues& step);

  // What this thread has put aside of o, and its sums with o.
  __device__ float4& partial(int warpgroup, int word) const {
    return shared.partial[warpgroup][word][threadIdx.x % kWarpgroup];
  }
  __device__ float4 with_partial(int warpgroup, int word, const Accumulator<kColumns>& o, const RowValues& by) const;
  __device__ void add_partial(int warpgroup, Accumulator<kColumns>& o, const RowValues& by) const;
  __device__ void store_partial(int warpgroup, const Accumulator<kColumns>& o, const RowValues& by, bool first) const;

  // Where logits go: float sums stay where they are.
  static __device__ Accumulator<kKeys>& in_place(Accumulator<kKeys>& s, Accumulator<kKeys>&) { return s; }
  static __device__ Accumulator<kKeys>& in_place(Accumulator<kKeys, int>&, Accumulator<kKeys>& converted) {
    return converted;
  }

  // Until all but the latest `Pending` products have come; `d` is among those.
  template <int Pending, class D>
  static __device__ void wait_products(D& d) {
    ptx::wgmma_wait<Pending>();
    ptx::fence_operand(d.x);
  }

  // Where a warpgroup that computes stands.
  struct Positions {
    PipelineState<k8BitStages> kv;
    int q;               // stage of the queries
    uint32_t ping_pong;  // phase; the first group does not wait for the first
  };

  __device__ void consume(int warpgroup);
  // Turns at the exponentials, from each warp to the one of the next group that has the same scheduler.
  __device__ void ping_pong_arrive(int warpgroup) const {
    if constexpr (Tile::kPingPong) {
      __syncwarp();
      if (threadIdx.x % 32 == 0)
        shared.ping_pong[(warpgroup + 1) % Tile::kWarpgroups][threadIdx.x / 32 % kWarps].arrive();
    }
  }
  // Returns a 0 that what is to wait is computed from.
  __device__ float ping_pong_wait(int warpgroup, Positions& at) const {
    if constexpr (Tile::kPingPong) {
      at.ping_pong ^= 1;
      return shared.ping_pong[warpgroup][threadIdx.x / 32 % kWarps].wait_for_zero(at.ping_pong ^ 1);
    }
    return 0.f;
  }
  __device__ void wait_kv(const Positions& at) const { shared.kv_pipe.full[at.kv.stage].wait(at.kv.phase); }
  __device__ void release_kv(Positions& at) const { shared.kv_pipe.empty[at.kv.stage].arrive(), at.kv.advance(); }

  // A stage of which this warpgroup needs nothing.
  __device__ void skip(Positions& at) const { wait_kv(at), release_kv(at); }

  // s = q k^T; issued, not awaited.
  __device__ void multiply_k(int warpgroup, const Positions& at, int stage, Sums& s) const {
    ptx::wgmma_fence();
    mma_ABt_8bit(s, q(at.q), warpgroup * kWarpgroupRows, k(stage));
    ptx::wgmma_commit();
  }
  // d (+)= p v; likewise.
  template <class D, class P>
  __device__ void multiply_v(const Positions& at, const P& p, D& d, bool accumulate) const {
    ptx::wgmma_fence();
    mma_ABt_8bit(d, p, v(at.kv.stage), accumulate);
    ptx::wgmma_commit();
  }

  __device__ auto group_scales(const Positions& at, int tile) const;
  __device__ void take_logits(const Positions& at, const Softmax& softmax, const Sums& s, Accumulator<kKeys>& x) const;
  // Of keys that a query does not see, logits become -inf; P 0 where keys have scales, as the scale of a group that
  // it sees in part may be NaN.
  static constexpr bool kMasksP = kKeyScales != KeyScales::none;
  __device__ void mask(int warpgroup, const TileInfo& q_tile, const Keys& keys, int tile, Accumulator<kKeys>& x,
                       float masked = -INFINITY) const;
  __device__ static bool needs_mask(const Keys& keys, int tile) {
    return tile < keys.whole_first || tile >= keys.whole_last;
  }
  // The first of this thread's two queries.
  __device__ static int query_of(const TileInfo& q_tile, int warpgroup) {
    return q_tile.q_start + warpgroup * kWarpgroupRows + fragment_row();
  }

  __device__ void attend(int warpgroup, const TileInfo& q_tile, const Keys& keys, Positions& at, Softmax& softmax,
                         Accumulator<kColumns>& o) const;
  __device__ void attend_scaled(int warpgroup, const TileInfo& q_tile, const Keys& keys, Positions& at,
                                Softmax& softmax, Accumulator<kColumns>& o) const;

  __device__ RowValues softmax_scale_log2(const TileInfo& q_tile, int query) const;
  // The first query of a sequence in arrays [batch, head, token].
  __device__ int64_t row_of(const TileInfo& q_tile) const {
    return (static_cast<int64_t>(q_tile.batch) * a.schedule.heads + q_tile.head) * a.schedule.q_tokens + q_tile.q_first;
  }

  __device__ void write(const TileInfo& q_tile, int query, const Softmax& softmax,
                        const Accumulator<kColumns>& sums) const;
  __device__ void write(const TileInfo& q_tile, int query, const RowValues& lse, Accumulator<Dims::kDimV>& o) const;

  template <class T>
  __device__ void write_as(const TileInfo& q_tile, int query, const RowValues& lse, Accumulator<Dims::kDimV>& o) const;
  __device__ void recompute_rows(const TileInfo& q_tile, int query) const;
};

}  // namespace octet::cuda::sm90
