// The 16-bit forward pass: o = softmax(scale q k^T) v and lse, for tiles of queries.
//
//   for each tile of keys, from the last to the first that the tile of queries sees:
//     s = q k^T;  p, l from exp with the stale maximum m;  o = o + p v
//     where such a p would be too large: repeat s;  m, p, l by online softmax;  o = o rescale + p v
//   o = o / l;  lse = scale m + ln l
//
// One producer thread loads the tiles by TMA. Each consumer warpgroup computes 64 queries. With ping-pong, one
// warpgroup issues its products while another computes exponentials. Within a warpgroup, the product s of a tile runs
// together with the product p v of the tile before (FlashAttention-3, arXiv 2407.08608, algorithm 2).
//
// q and k have 16 bits, or they are 8-bit quantized values with a scale for each query and each key. In the second case
// s is a product of integers, a logit is s times the scale of its key, and the scale of the query is part of the
// softmax's scale_log2.
//
// Where o is compensated (fragment/precision.h), V is centred by its mean, and the epilogue adds the mean back. Tensor
// cores truncate o towards 0 after every 16 keys. Half way through the tiles of keys, o is therefore sign-flipped: it
// becomes o - 2 a, where a is close to o, and 2 a is added back at the end. The truncation errors of the second half
// have the other sign.
#pragma once
#include <type_traits>

#include "cuda/fragment/mask.h"
#include "cuda/fragment/output.h"
#include "cuda/fragment/precision.h"
#include "cuda/fragment/sign_flip.h"
#include "cuda/fragment/sinks.h"
#include "cuda/fragment/softmax.h"
#include "cuda/fragment/softmax_8bit.h"
#include "cuda/fragment/softmax_alibi.h"
#include "cuda/fragment/softmax_masked.h"
#include "cuda/fragment/unmasked_row.h"
#include "cuda/ptx/grid.h"
#include "cuda/sm90/fwd/config.h"
#include "cuda/sm90/fwd/convert_v.h"
#include "cuda/sm90/fwd/draw.h"
#include "cuda/sm90/fwd/params.h"
#include "cuda/sm90/mma.h"
#include "cuda/sm90/pipeline.h"
#include "cuda/sm90/seen_tiles.h"
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

  static constexpr bool kQuantizedQk = kIntegerLogits<Precision>, kAlibi = kHasAlibi<Precision>,
                        kDrops = kHasDropout<Precision>, kMasked = kHasMask<Precision>;
  static constexpr bool kBiased = kQuantizedQk || kAlibi || kMasked;  // rows may have a row bias (fragment/finish.h)
  template <int Rows>
  using OperandTile = std::conditional_t<kQuantizedQk, SharedTile8Bit<typename Precision::QkType, Rows, Dims::kDim>,
                                         SharedTile<typename Precision::QkType, Rows, Dims::kDim>>;

  // True: a warpgroup skips the tiles along the diagonal that none of its queries sees.
  static constexpr bool kSkips = !kHasFewKeys<Precision> && kRows - kWarpgroupRows >= kKeys;

  // True: where a warpgroup sees only the first half of its first tile, it computes only that half. Where both cases
  // occur in every tile of queries, as at d = 128, the second copy of the instructions costs what this saves.
  static constexpr bool kHalves = kSkips && !kQuantizedQk;

  // True: where tiles of keys and of queries do not end together, some rows see no key of the first tile under a causal
  // mask. Without a maximum, they would make the warpgroup repeat the next tile.
  static constexpr bool kStartsLate = kKeys % kWarpgroupRows != 0 && !kQuantizedQk && !kHasBeta<Precision>;
  static_assert(!((kAlibi || kMasked) && (kStartsLate || kQuantizedQk)));

  // True: a 16-bit o is stored through the shared memory of q, as the next q has another stage.
  static constexpr bool kThroughQ = !kQuantizedQk && Tile::kQStages > 1;

  // True: this kernel can convert v to f16 itself.
  static constexpr bool kConvertsV = kCompensated<Precision>;
  using Converter = VConverter<kMasked, !kDrops>;

  using TileQ = OperandTile<kRows>;
  using TileK = OperandTile<kKeys>;
  using TileV = SharedTile<typename Precision::PType, kKeys, Dims::kDimV>;
  // A warpgroup's rows of a tile of the mask tensor.
  using TileMask = SharedTile<std::conditional_t<kMasked, typename Precision::QkType, Bf16>, kWarpgroupRows, kKeys>;

  // A compensated o is sign-flipped where shared memory has room for a, with 16 bits for each number.
  static constexpr int kSavedOWords = kSavedWords<Dims::kDimV>,
                       kSavedBytes = kConsumerThreads * kSavedOWords * sizeof(uint4);
  static constexpr int kTileBytes = Tile::kQStages * TileQ::kBytes + Tile::kStages * (TileK::kBytes + TileV::kBytes) +
                                    (kMasked ? Tile::kWarpgroups * TileMask::kBytes : 0);
  static constexpr bool kFlipsSigns =
      kCompensated<Precision> && kTileBytes + kSavedBytes + 2 * kSwizzleBytes <= kMostSharedBytes;

  // The producer's message to the consumers about a tile of queries.
  struct NoSlope {};
  struct Slope {
    float slope;  // of ALiBi, in base 2
  };
  struct Block : std::conditional_t<kAlibi, Slope, NoSlope> {
    TileInfo q_tile;
    SeenTiles tiles, warpgroup_tiles[Tile::kWarpgroups];
  };

  // Each warpgroup has one stage of the mask tensor.
  struct NoMaskTiles {};
  struct alignas(kSwizzleBytes) MaskTiles {
    unsigned char mask[Tile::kWarpgroups][TileMask::kBytes];
    float row_bias[Tile::kWarpgroups][kWarpgroupRows];
    Pipeline<Tile::kWarpgroups> mask_pipe;
  };
  struct alignas(kSwizzleBytes) Shared : std::conditional_t<kMasked, MaskTiles, NoMaskTiles> {
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

  // Named barriers; each is the first of one per consumer warpgroup.
  enum NamedBarrier : int { kPingPongBarrier = 1, kVoteBarrier = kPingPongBarrier + Tile::kWarpgroups };

  const ForwardParams& a;
  Shared& shared;

  __device__ TileQ q(int stage) const { return {shared.q[stage]}; }
  __device__ TileK k(int stage) const { return {shared.k[stage]}; }
  __device__ TileV v(int stage) const { return {shared.v[stage]}; }

  // Returns the first key of a sequence in k. Each sequence of quantized values starts at a new tile.
  __device__ int first_key_of(const TileInfo& q_tile) const {
    return kQuantizedQk && a.scheduler.cu_seqlens_k ? (q_tile.k_first / kKeys + q_tile.sequence) * kKeys
                                                    : q_tile.k_first;
  }

  __device__ void produce();
  __device__ void fetch_mask(const Block& block, int tile, int turn) const;
  __device__ void convert_v() const;
  __device__ void convert_first_v() const;

  __device__ RowValues softmax_scale_log2(const TileInfo& q_tile, int query) const;
  __device__ AlibiRow alibi_row(const TileInfo& q_tile, float slope, int query) const {
    return AlibiRow::of(slope, query + q_tile.k_tokens - q_tile.q_tokens,
                        a.mask.keys_of(query, q_tile.q_tokens, q_tile.k_tokens));
  }
  __device__ auto start_softmax(const TileInfo& q_tile, int query) const;

  // Each warp's copy of the current tile, for the time after its stage of q is released.
  __device__ TileInfo& saved_tile(int warpgroup) const {
    return shared.saved_tile[warpgroup][threadIdx.x / 32 % kWarps];
  }
  __device__ void save_tile(const Block& block, int warpgroup) const;

  // Returns where this thread saves a of the sign flip; its words lie kWarpgroup apart.
  __device__ uint4* partial(int warpgroup) const {
    return shared.partial + warpgroup * kSavedOWords * kWarpgroup + threadIdx.x % kWarpgroup;
  }

  // Returns what o is multiplied by: the power of two of v, and the scale of the elements of P that dropout keeps.
  __device__ float v_scale_of(int kv) const {
    const float scale = a.v_scale ? a.v_scale[kv] : 1.f;
    return kDrops ? scale * a.dropout.scale : scale;
  }

  // The V mean of this thread's columns.
  struct SomeVMean {
    float2 x[Dims::kDimV / 8];
  };
  struct NoVMean {};
  using VMean = std::conditional_t<kCompensated<Precision>, SomeVMean, NoVMean>;
  // True: it is read during the last product. Where o has more columns, there are no registers for that.
  static constexpr bool kVMeanEarly = Dims::kDimV <= (kCompensated<Precision> && Tile::kWarpgroups > 2 ? 64 : 128);
  __device__ VMean v_mean_of(const TileInfo& q_tile) const {
    VMean v_mean;
    if constexpr (kDrops) {
      v_mean = {};
    } else if constexpr (kCompensated<Precision>) {
      const int64_t kv = q_tile.batch * (a.scheduler.heads / a.group) + q_tile.head / a.group;
#pragma unroll
      for (int i = 0; i < Dims::kDimV / 8; ++i)
        v_mean.x[i] = *reinterpret_cast<const float2*>(a.v_mean + kv * Dims::kDimV + 8 * i + fragment_column());
    }
    return v_mean;
  }

  // The positions of a consumer warpgroup in its pipelines. They and what Rows refers to are variables of consume(), as
  // ptxas orders what uses members of one struct otherwise.
  struct Positions {
    PipelineState<Tile::kQStages>& q;
    PipelineState<Tile::kStages>&k, &v;
    uint32_t& cleared_phase;
  };

  __device__ void ping_pong_wait(int warpgroup) const {
    if (Tile::kPingPong) ptx::barrier_sync(kPingPongBarrier + warpgroup, 2 * kWarpgroup);
  }
  __device__ void ping_pong_arrive(int warpgroup) const {
    if (Tile::kPingPong) ptx::barrier_arrive(kPingPongBarrier + (warpgroup + 1) % Tile::kWarpgroups, 2 * kWarpgroup);
  }
  __device__ void wait_k(const Positions& at) const { shared.k_pipe.full[at.k.stage].wait(at.k.phase); }
  __device__ void wait_v(const Positions& at) const { shared.v_pipe.full[at.v.stage].wait(at.v.phase); }
  __device__ void release_k(const Positions& at) const { shared.k_pipe.empty[at.k.stage].arrive(), at.k.advance(); }
  __device__ void release_v(const Positions& at) const { shared.v_pipe.empty[at.v.stage].arrive(), at.v.advance(); }

  using Softmax = std::conditional_t<kHasBeta<Precision>, ShiftedSoftmax, OnlineSoftmax>;
  using S = Accumulator<kKeys, typename Precision::Sum>;
  using X = Accumulator<kKeys>;
  using O = Accumulator<Dims::kDimV>;
  using P = Operand<typename Precision::PType, kKeys>;

  // The rows of a warpgroup in a tile of queries, of which this thread has `query` and query + 8.
  struct Rows {
    int warpgroup;
    const TileInfo& q_tile;
    const SeenTiles& tiles;
    int query;
    Interval (&ranges)[kRowsPerThread];  // the keys that they see
    Softmax& softmax;
    O& o;
    RowValues& twice;  // 2, rescaled as o is since its sign flip
  };
  __device__ void find_ranges(const Rows& rows, int query, Interval (&ranges)[kRowsPerThread]) const {
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row)
      ranges[row] = a.mask.keys_of(query + 8 * row, rows.q_tile.q_tokens, rows.q_tile.k_tokens);
  }
  // Sets the logits of keys that the rows do not see to -inf. Beside a mask tensor there are no registers for ranges.
  template <class Logits>
  __device__ void hide(const Rows& rows, Logits& x, int tile) const {
    if constexpr (kMasked) {
      Interval ranges[kRowsPerThread];
      find_ranges(rows, ptx::opaque(rows.query), ranges);
      mask_rows(x, tile * kKeys, ranges);
    } else {
      mask_rows(x, tile * kKeys, rows.ranges);
    }
  }
  template <class Logits>
  __device__ void mask(const Rows& rows, Logits& x, int tile) const {
    if (needs_mask<kKeys>(rows.tiles, tile)) hide(rows, x, tile);
  }

  // ALiBi of a tile of keys. The slope is read where it is needed, as there may be no register for it.
  __device__ AlibiTile alibi_tile(const Positions& at, int query, int tile) const {
    const Block& block = shared.block[at.q.stage];
    return {a.scale_log2e, block.slope, query + block.q_tile.k_tokens - block.q_tile.q_tokens,
            tile * kKeys + fragment_column()};
  }

  __device__ float* row_bias_of(int warpgroup, int thread) const {
    return &shared.row_bias[warpgroup][thread % kWarpgroup / 32 * 16 + thread % 32 / 4];
  }
  // The mask tensor of a tile of keys, once it has arrived, while `at` is at that tile of k.
  __device__ auto mask_tile(const Positions& at, int warpgroup) const {
    shared.mask_pipe.full[warpgroup].wait(at.k.stage);  // of two, for turns of one
    // opaque() stops ptxas from keeping addresses in registers throughout the kernel.
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
    const float* const row_bias = row_bias_of(warpgroup, thread);
    return MaskTile<typename TileMask::Element, TileMask::kPanelBytes>{
        TileMask{shared.mask[warpgroup]}.address() + store_offset(thread), a.scale_log2e, {row_bias[0], row_bias[8]}};
  }
  __device__ void release_mask(int warpgroup) const {
    if constexpr (kMasked) shared.mask_pipe.empty[warpgroup].arrive();
  }
  // Reads the row biases of this thread's rows, which the four threads of a row all write. Rows beyond the queries see
  // nothing: their q is 0, and 0 times an inf of a hidden key would have the warpgroup repeat the tile.
  __device__ void save_row_biases(const TileInfo& q_tile, int warpgroup, int query) const {
    if constexpr (kMasked) {
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) {
        const int i = query + 8 * row;
        const float bias = a.mask_rows.bias(q_tile.batch, q_tile.head, min(i, q_tile.q_tokens - 1));
        row_bias_of(warpgroup, ptx::opaque(static_cast<int>(threadIdx.x)))[8 * row] =
            i < q_tile.q_tokens ? bias : INFINITY;
      }
      __syncwarp();
    }
  }

  // True: dropout draws its random numbers between the exponentials. Three warpgroups have no registers for that.
  static constexpr bool kDrawsBesideExp = kDrops && Tile::kWarpgroups < 3;
  using Drawn = std::conditional_t<kDrawsBesideExp, Draw<kKeys>, NoDraw>;
  __device__ Drawn start_draw(const Rows& rows, int tile) const {
    if constexpr (kDrawsBesideExp)
      return {a.dropout, rows.q_tile.sequence, rows.q_tile.head, rows.query, tile * kKeys};
    else
      return {};
  }
  // Converts P for the product with v, and drops what dropout drops.
  template <class Logits>
  __device__ void convert_p(const Rows& rows, int tile, const Logits& x, P& p) const {
    convert(x, p);
    if constexpr (kDrops) {
      const int sequence = rows.q_tile.sequence;
      KeptElements<kKeys, RowTokens::queries> kept;
      kept.find(a.dropout.stream(sequence, rows.q_tile.head), a.dropout.dropped, rows.query, tile * kKeys,
                a.dropout.places_of(sequence));
      drop(p, kept);
    }
  }
  __device__ void convert_p(const Rows& rows, int tile, const X& x, Drawn& drawn, P& p) const {
    if constexpr (kDrawsBesideExp)
      convert(x, p), drop(p, drawn.kept());
    else
      convert_p(rows, tile, x, p);
  }

  // The verbs of the mainloop. Products are issued without waiting for them. `stage`: of k.
  template <class Product>
  __device__ void multiply_qk(const Positions& at, int warpgroup, int stage, Product& s) const;
  __device__ void multiply_pv(const Positions& at, const P& p, O& o) const;
  template <class Product, class Logits>
  __device__ void take_logits(const Positions& at, Product& s, Logits& x) const;
  __device__ void clear_v(const TileInfo& q_tile, int tile, const Positions& at) const;
  // Releases a tile that none of this warpgroup's queries sees.
  __device__ void skip(const TileInfo& q_tile, int warpgroup, int tile, const Positions& at) const {
    if constexpr (kMasked) shared.mask_pipe.full[warpgroup].wait(at.k.stage), release_mask(warpgroup);
    wait_k(at), release_k(at), clear_v(q_tile, tile, at), wait_v(at), release_v(at);
  }
  __device__ void skip_last(const Rows& rows, const SeenTiles& tiles, const Positions& at) const;
  __device__ void skip_first(const Rows& rows, const SeenTiles& tiles, const Positions& at) const;
  template <class Product, class Logits>
  __device__ void begin(const Rows& rows, const Positions& at, Product& s, Logits& x, P& p) const;
  __device__ RowValues exp_stale_max(const Rows& rows, const Positions& at, int tile, X& x, bool& is_linear) const;
  // Returns whether P over the stale maximum, of these sums in a thread, may stay.
  __device__ static bool p_fits(const Softmax& softmax, const RowValues& sum) {
    bool fits = sum[0] <= Precision::kMaxP && sum[1] <= Precision::kMaxP;
    if constexpr (kMasked) fits &= fits_beside_sum<Precision::kPExponent>(softmax, sum);  // all threads take part
    return fits;
  }
  __device__ void repeat(const Rows& rows, const Positions& at, int tile, S& s, X& x) const;
  __device__ void finish(const Rows& rows, VMean& v_mean, const Positions& at) const;
  __device__ void consume(int warpgroup);

  __device__ bool write(const TileInfo& q_tile, int query, const OnlineSoftmax& softmax, VMean& v_mean,
                        Accumulator<Dims::kDimV>& o, unsigned char* q, int warpgroup) const;
  __device__ void write_lse(const TileInfo& q_tile, int query, const RowValues& log2_origin, const RowValues& l,
                            const RowValues& row_bias) const;

  template <class T>
  __device__ bool write_as(const TileInfo& q_tile, int query, Accumulator<Dims::kDimV>& o, unsigned char* q,
                           int warpgroup) const;
  template <class T>
  __device__ bool write_to(const Output& to, const TileInfo& q_tile, int query, const Accumulator<Dims::kDimV>& o,
                           unsigned char* q, int warpgroup) const;

  __device__ void recompute_rows(const TileInfo& q_tile, int warpgroup) const;
};

}  // namespace octet::cuda::sm90
