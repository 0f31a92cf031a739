// The forward pass: o = softmax(logits) v and lse, for a tile of queries per thread block (FlashAttention-2, arXiv
// 2307.08691).
//
//   for each tile of keys, from the last to the first that the tile of queries sees:
//     s = q k^T
//     where some p over the stale maximum m would be too large:  update m;  o = o rescale,  l = l rescale
//     p = exp(s - m);  l = l + sum of p;  o = o + p v
//   o = o / l;  lse = scale m + ln l
//
// All warps load the tiles by cp.async, one tile ahead. Each warp computes its own queries and skips tiles that none of
// them sees.
//
// Logits::general (sm80/kinds.h): logits may have a softcap, ALiBi and a mask tensor (sm80/logits.h), and the maximum
// may be shifted (bias correction beta), which is then updated in every tile.
//
// TileRows::pairs and pages: thread blocks (x, y) for all y compute the same tile, each for its split of the keys;
// fwd/combine.h combines what they write. Where warps share rows, each has its part of the keys of every tile, and the
// first adds up what they found before it writes.
//
// Head dims above 256: warps share the rows of a tile, and each has its part of the channels. They add up their parts
// of s in shared memory, in one order, so that all of them find the same P, and each computes its channels of o.
//
// Where o is compensated (fragment/precision.h), V is centred by its mean, and the epilogue adds the mean back. Tensor
// cores truncate o towards 0 after every 16 keys. Half way through the tiles of keys, o is therefore sign-flipped
// (fragment/sign_flip.h): it becomes o - 2 a, where a is close to o, and 2 a is added back at the end. Until then a
// lies in the rows of the output, of which each number has room for 16 bits.
#pragma once
#include <type_traits>

#include "cuda/fragment/sign_flip.h"
#include "cuda/sm80/fwd/operands_codes.h"
#include "cuda/sm80/fwd/operands_e4m3.h"
#include "cuda/sm80/fwd/operands_f16_sums.h"
#include "cuda/sm80/fwd/operands_int8.h"
#include "cuda/sm80/fwd/operands_training.h"
#include "cuda/sm80/fwd/params.h"
#include "cuda/sm80/mask_tile.h"
#include "cuda/sm80/smem.h"

namespace octet::cuda::sm80 {

template <class Kind>
struct Forward {
  using Precision = typename Kind::Precision;
  using Dims = typename Kind::Dims;
  static constexpr bool kPlain = Kind::kLogits == Logits::plain, kMasked = Kind::kLogits == Logits::masked,
                        kGeneral = Kind::kLogits == Logits::general, kPaged = in_pages(Kind::kTileRows),
                        kPairs = has_pairs(Kind::kTileRows);
  using Operands = ForwardOperands<Precision>;
  static constexpr bool kDrops = kGeneral && !kPairs && Operands::kHasDropout;  // it has dropout
  using Tile = typename Operands::template Tile<Dims, Kind::kLogits, Kind::kTileRows>;
  using QkType = typename Precision::QkType;
  using KType = typename Operands::template KType<Precision>;
  static constexpr int kRowBlocks = Tile::kRowBlocks, kKeys = Tile::kKeys, kKeyWarps = key_warps<Tile>();
  static constexpr int kChannelWarps = channel_warps<Tile>(), kSharers = kKeyWarps * kChannelWarps;
  static constexpr int kChannels = Dims::kDim / kChannelWarps, kChannelsV = Dims::kDimV / kChannelWarps;  // of a warp
  static constexpr int kWarpKeys = kKeys / kKeyWarps;                                                     // of a tile
  static constexpr int kThreads = Tile::kWarps * 32, kRowsOfWarp = kRowBlocks * kWarpRows;
  static constexpr int kLoadedKeys = doubles<Tile>() ? 2 * kKeys : kKeys;  // at a time
  static constexpr int kRows = Tile::kWarps / kSharers * kRowsOfWarp;
  using TileQ = SharedTile<QkType, kRows, Dims::kDim>;
  using TileK = SharedTile<KType, kKeys, Dims::kDim>;
  using TileV = typename Operands::template TileV<kKeys, Dims::kDimV>;
  using VType = typename TileV::Element;
  static_assert(!kPairs || !kCompensated<Precision>);

  // The tiles of keys that a range of rows sees.
  struct SeenTiles {
    int first, last;  // tiles [first, last) that any of the rows sees
    Interval all;     // the keys that all of them see
  };

  // The tile of queries and its keys lie here and not in registers, of which o leaves few.
  static constexpr int kVStages = Tile::kLateV ? 1 : Tile::kStages;
  using ThreadIndex = std::conditional_t<Tile::kLateV, unsigned, int>;
  using LoaderK = TileLoader<kThreads, TileK, ThreadIndex>;
  using LoaderV = TileLoader<kThreads, TileV, ThreadIndex>;

  using OTile = Accumulator<kChannelsV>;
  using SBlock = Accumulator<kWarpKeys>;
  static constexpr int kSteps = kChannels / kStepColumns<QkType>;
  static constexpr int kPartNumbers = kRowBlocks * kWarpKeys / 2;  // of a thread's part of s

  struct alignas(128) Shared {
    unsigned char q[Operands::kTiles][TileQ::kBytes];
    unsigned char k[Tile::kStages][Operands::kTiles][TileK::kBytes];
    unsigned char v[kVStages][Operands::kTiles][TileV::kBytes];
    typename Operands::template Factors<kRows, kKeys, Tile::kStages> factors;
    // A tile of the mask tensor. Where kMasked it follows this struct, with the bytes that its type takes.
    alignas(kChunkBytes) unsigned char mask[Tile::kStagesMask && !kMasked ? kRows * mask_row_bytes(kKeys, sizeof(float))
                                                                          : 16];
    TileInfo q_tile;
    SeenTiles tiles, warp_tiles[Tile::kWarps];
    // Of ALiBi and the mask tensor, where logits are general: the slope, and of each row the row bias and the distance
    // that it belongs to.
    float slope, row_bias[!kPlain ? kRows : 1];
    int nearest[!kPlain ? kRows : 1];
    Interval seen;  // the keys that any query of the sequence sees
    // Its first key.
    const KType* k_start;
    const VType* v_start;
    // With kMasked: where the mask of the tile of queries starts, and where the classes of each warp's tiles start.
    const unsigned char* mask_start;
    const int* mask_classes[kMasked ? Tile::kWarps : 0];
    float m_at_flip[kCompensated<Precision> ? kRows : 1];
    // For few queries, whose rows belong to several heads: the end of the rows, and the terms of each row.
    int rows_end;
    RowTerms terms[!kPlain && kPairs ? kRows : 1];
    // The parts of s of warps that share channels. With one stage they take the place of k, once it has been read.
    alignas(kChunkBytes) float parts[kChannelWarps > 1 && Tile::kStages > 1 ? kThreads* kPartNumbers : 0];
  };
  static constexpr int kSharedBytes = sizeof(Shared);
  static_assert(kSharedBytes <= kMostSharedBytes);

  using Softmax = typename Operands::template Softmax<Kind::kLogits>;
  using S = SBlock[kRowBlocks];
  using O = OTile[kRowBlocks];
  using QRows = Operand<QkType, kChannels>[kRowBlocks];
  using P = typename Operands::template P<kRowBlocks, kWarpKeys>;

  const ForwardParams& a;
  Shared& shared;

  // Tiles of keys take the stages in turn. `which`: of Operands::kTiles.
  static __device__ unsigned stage_of(int tile) { return static_cast<unsigned>(tile) % Tile::kStages; }
  __device__ TileQ q(int which = 0) const { return {shared.q[which]}; }
  __device__ TileK k(int tile, int which = 0) const { return {shared.k[stage_of(tile)][which]}; }
  __device__ TileV v(int tile, int which = 0) const {
    return {shared.v[static_cast<unsigned>(tile) % kVStages][which]};
  }

  // Rows are numbered within the sequence: its queries or, where kPairs, its pairs of a query and a head of the tile.
  __device__ int query_of(int row) const { return kPairs ? row / a.tile_heads : row; }
  __device__ int head_of(int row) const {
    return kPairs ? shared.q_tile.head * a.tile_heads + row % a.tile_heads : shared.q_tile.head;
  }
  __device__ int rows_end() const { return kPairs ? shared.rows_end : shared.q_tile.q_tokens; }
  // Finds the tile of this thread block.
  __device__ void start_tile() const {
    shared.q_tile = a.scheduler.at(blockIdx.x);
    if constexpr (kPairs) {
      TileInfo& tile = shared.q_tile;
      if (kPaged && a.pages.lengths && tile.valid()) tile.k_tokens = a.pages.length(tile.sequence);
      shared.rows_end = min(tile.q_start + tile.rows, tile.q_tokens) * a.tile_heads;
      tile.q_start *= a.tile_heads;
    }
  }
  // Returns the batch element of k and v from which their tokens are counted.
  __device__ int first_page() const { return kPaged ? 0 : shared.q_tile.batch; }
  // Outputs of splits of the keys are apart as batch elements are.
  __device__ int output_batch() const {
    return kPairs ? static_cast<int>(shared.q_tile.batch * gridDim.y + blockIdx.y) : shared.q_tile.batch;
  }
  __device__ int64_t output_offset(const Output& to, int row) const {
    return to.offset(output_batch(), head_of(row), int64_t{shared.q_tile.q_first} + query_of(row));
  }
  template <class T>
  __device__ T* output_row(const Output& to, int row) const {
    return static_cast<T*>(to.data) + output_offset(to, row);
  }

  // Returns the tiles of keys that `rows` rows from `row` on see.
  __device__ SeenTiles tiles_of(int row, int rows) const {
    const int last = min(row + rows, rows_end()) - 1;
    const auto [any, all] =
        a.mask.keys_of_all(query_of(row), query_of(last) + 1, shared.q_tile.q_tokens, shared.q_tile.k_tokens);
    if (last < row || any.last <= any.first) return {0, 0, {0, 0}};
    const Interval tiles = any.tiles(kKeys);
    return {tiles.first, tiles.last, all};
  }
  __device__ Interval range_of(int row) const {
    return a.mask.keys_of(query_of(row), shared.q_tile.q_tokens, shared.q_tile.k_tokens);
  }
  // Returns those keys of a row that are this thread block's.
  __device__ Interval split_of(const Interval& keys) const {
    if constexpr (!kPairs) return keys;
    const int first = max(keys.first, shared.tiles.first * kKeys), last = min(keys.last, shared.tiles.last * kKeys);
    return {first, max(first, last)};
  }
  // Sets the tiles of keys of the thread block and of its warps.
  __device__ void start_tiles() const {
    const bool first = threadIdx.x == 0;
    if constexpr (!kPairs) {
      if (first) shared.tiles = tiles_of(shared.q_tile.q_start, kRows);
      if (threadIdx.x % 32 == 0) shared.warp_tiles[threadIdx.x / 32] = tiles_of(warp_row(), kRowsOfWarp);
    } else if (threadIdx.x % 32 == 0) {
      SeenTiles split = tiles_of(shared.q_tile.q_start, kRows), own = tiles_of(warp_row(), kRowsOfWarp);
      const int count = (split.last - split.first + static_cast<int>(gridDim.y) - 1) / static_cast<int>(gridDim.y);
      split.first = min(split.first + static_cast<int>(blockIdx.y) * count, split.last);
      split.last = min(split.first + count, split.last);
      own.first = max(own.first, split.first), own.last = min(own.last, split.last);
      if (first) shared.tiles = split;
      shared.warp_tiles[threadIdx.x / 32] = own;
    }
  }
  // Leaves out the tiles before the first and behind the last that the mask does not hide from all rows of a warp.
  __device__ void skip_hidden_tiles() const {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    __syncwarp();
    SeenTiles& own = shared.warp_tiles[warp];
    const int* const classes = a.mask_classes.of(shared.q_tile.batch, shared.q_tile.head, warp_row() / kRowsOfWarp);
    const Interval seen = seen_tiles(classes, 1, own.first, own.last);
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.mask_classes[warp] = classes, own.first = seen.first, own.last = seen.last;
    __syncthreads();
    if (threadIdx.x > 0) return;
    int first = shared.tiles.last, last = shared.tiles.first;
    for (const SeenTiles& each : shared.warp_tiles)
      if (each.first < each.last) first = min(first, each.first), last = max(last, each.last);
    shared.tiles.first = first, shared.tiles.last = last;
  }
  // Returns the tiles of keys that this warp's rows see.
  __device__ const SeenTiles& warp_tiles() const { return shared.warp_tiles[static_cast<int>(threadIdx.x) / 32]; }
  // Half way through its tiles, a warp flips the sign of a compensated o.
  __device__ bool flips_after(int tile) const {
    const SeenTiles& tiles = warp_tiles();
    return tiles.last - tiles.first > 1 && tile == tiles.last - 1 - (tiles.last - tiles.first) / 2;
  }
  // Returns the first row of this warp, and the first of this thread in a row block.
  __device__ int warp_row() const {
    return shared.q_tile.q_start + static_cast<ThreadIndex>(threadIdx.x) / (32 * kSharers) * kRowsOfWarp;
  }
  // Returns this warp's part of the keys of a tile, counted in parts.
  static __device__ int key_part() {
    return kKeyWarps == 1 ? 0 : ptx::opaque(static_cast<int>(threadIdx.x)) / 32 % kKeyWarps;
  }
  // Returns this warp's part of the channels, and the first one of it, of v and of an output.
  static __device__ int channel_part() {
    return kChannelWarps == 1 ? 0 : ptx::opaque(static_cast<int>(threadIdx.x)) / 32 % kChannelWarps;
  }
  static __device__ int first_channel() { return channel_part() * kChannelsV; }
  static __device__ decltype(auto) channels_of(const Output& t) {
    if constexpr (kChannelWarps == 1) {
      return (t);
    } else {
      Output part = t;
      const int bytes = t.element == Element::f32 ? 4 : t.element == Element::i8 ? 1 : 2;
      if (t.data) part.data = static_cast<unsigned char*>(t.data) + first_channel() * bytes;
      return part;
    }
  }
  static __device__ int first_key_of_warp(int tile) { return tile * kKeys + key_part() * kWarpKeys; }
  __device__ int thread_row(int block) const {
    return warp_row() + block * kWarpRows + static_cast<ThreadIndex>(threadIdx.x) % 32 / 4;
  }

  // Computes the terms of all rows that are kept in shared memory.
  __device__ void start_terms() const {
    for (int i = static_cast<int>(threadIdx.x); i < kRows; i += kThreads) {
      const int row = shared.q_tile.q_start + i;
      const RowTerms terms = row_terms(a.terms, shared.q_tile.batch, shared.q_tile.sequence, head_of(row),
                                       query_of(row), shared.q_tile.q_tokens, shared.q_tile.k_tokens, range_of(row));
      if constexpr (kPairs) {
        shared.terms[i] = terms;
        continue;
      }
      shared.row_bias[i] = terms.row_bias, shared.nearest[i] = terms.nearest;
      if (i == 0) shared.slope = terms.slope;
    }
  }
  __device__ RowTerms terms_of(int row) const {
    if constexpr (kPairs) return shared.terms[row - shared.q_tile.q_start];
    const int at = row - shared.q_tile.q_start, i = min(row, shared.q_tile.q_tokens - 1);
    return {shared.slope, shared.row_bias[at], i + shared.q_tile.k_tokens - shared.q_tile.q_tokens, shared.nearest[at],
            a.terms.mask_row(shared.q_tile.batch, shared.q_tile.head, i)};
  }
  // Returns what the logits of a row lack, without and with what the smoothing of k took from them.
  __device__ float lse_bias_of(int row) const { return row_bias_of(row) + Operands::mean_logit(*this, row); }
  // Returns true if a mask tensor or dropout may keep any key from any row.
  __device__ bool hides_keys() const { return (!kPlain && a.terms.mask) || (kDrops && a.dropout.seed); }
  // Returns what o is multiplied by: the factor of v, and that of elements of P that dropout keeps.
  __device__ float v_scale_of(int kv) const {
    const float scale = a.v_scale ? a.v_scale[kv] : 1.f;
    return kDrops ? scale * a.dropout.scale : scale;
  }
  __device__ float row_bias_of(int row) const {
    const int at = row - shared.q_tile.q_start;
    return kPlain ? 0.f : kPairs ? shared.terms[at].row_bias : shared.row_bias[at];
  }

  __device__ void run() const;
  __device__ void run_wide() const;
  // Finds the tile of queries of this thread block and starts to load it. Returns whether there is one.
  __device__ bool start() const {
    if (threadIdx.x == 0) start_tile();
    __syncthreads();
    if (!shared.q_tile.valid()) return false;
    if (threadIdx.x == 0) start_sequence();
    start_tiles();
    if constexpr (kMasked) skip_hidden_tiles();
    if constexpr (!kPlain) start_terms();
    if constexpr (!Operands::kConvertsQ) Operands::load_q_factors(*this);
    __syncthreads();
    load_q();
    ptx::cp_async_commit();
    return true;
  }
  __device__ void multiply_qk_by_channels(const QRows& q, S& s, int tile) const;
  __device__ void multiply_part(const QRows& q, S& s, int tile) const;
  __device__ float* parts(int warp) const;
  __device__ void put_part(const S& s) const;
  __device__ void add_parts(S& s) const;
  // The places in a tile of k and of v at which this thread starts.
  struct Sources {
    const KType* k;
    const VType* v;
  };
  // The rows of a tile in pages that a warp loads, of which it has kRowsAtOnce for each load. A lane looks up the page
  // of one of them, a tile ahead.
  static constexpr bool kWideRows = LoaderK::kChunks > 32;  // warps share rows
  static constexpr int kRowsOfLoad = kWideRows ? 1 : 32 / LoaderK::kChunks, kPagedRows = kRowsOfLoad * LoaderK::kLoads;
  static_assert(!kPaged || (kRowsOfLoad > 0 && kPagedRows <= 32));
  static __device__ int paged_row() {
    const unsigned thread = ptx::opaque(static_cast<int>(threadIdx.x)), row = thread % 32 % kPagedRows;
    const unsigned first = kWideRows ? thread / LoaderK::kChunks : thread / 32 * kRowsOfLoad;
    return first + row % kRowsOfLoad + row / kRowsOfLoad * LoaderK::kRowsAtOnce;
  }
  // Returns how far the row of a key lies from that of the first one; of pages, from the first token of the first page.
  __device__ int64_t key_offset(const Output& t, int key) const {
    if constexpr (kPaged)
      return a.pages.page(shared.q_tile.sequence, key) * t.stride[0] + a.pages.token_in_page(key) * t.stride[2];
    else
      return key * t.stride[2];
  }
  __device__ Sources sources_of(int tile) const {
    return {LoaderK::source(shared.k_start + tile * kKeys * a.k.stride[2], a.k.stride[2]),
            Operands::source_v(*this, tile)};
  }
  // Where the mask is staged, the groups of copies are in turn a tile of keys and one of the mask.
  static constexpr int kMaskGroups = Tile::kStagesMask ? 1 : 0;
  // True: they are kept in registers. P in f16 leaves none, nor do three thread blocks on a multiprocessor.
  static constexpr bool kKeepsSources = Operands::kExponent == 0 && !Operands::kHasFactors && !kPairs;

  __device__ void start_sequence() const;
  __device__ void load_q() const;
  __device__ int page_of_lane(int tile) const;
  __device__ void load_keys(int tile, const Sources& from, int page) const;
  template <bool OfK, bool OfV>
  __device__ void load_pages(int tile, const Interval& rows, int page_of_lane) const;
  __device__ void load_late_v(int tile, int page) const;
  __device__ void run_doubled() const;  // fwd/mainloop_doubled.h
  template <class T, class Stages>
  static __device__ auto pair_of(Stages& stages, int pair) {
    return SharedTile<typename T::Element, kLoadedKeys, T::kColumns>{stages[2 * (static_cast<unsigned>(pair) % 2)][0]};
  }
  struct Lanes {
    uint32_t q, k, v;  // where this lane's rows of their tiles lie
  };
  __device__ void load_pair(int pair) const;
  __device__ void compute_half(int pair, int half, const Lanes& lanes, const QRows& q_rows,
                               Softmax (&softmax)[kRowBlocks], O& o) const;
  // Waits until all threads have loaded their parts of a v that is late; the groups that follow its own may be on the
  // way.
  static __device__ void wait_late_v() {
    if constexpr (Tile::kLateV) ptx::cp_async_wait<kMaskGroups + 1>(), __syncthreads();
  }
  __device__ bool stages_mask() const { return kMasked || (Tile::kStagesMask && a.terms.mask && a.terms.mask_chunks); }
  __device__ unsigned char* mask_tile() const {
    return kMasked ? reinterpret_cast<unsigned char*>(&shared) + kSharedBytes : shared.mask;
  }
  // Returns this thread's numbers of the tile of the mask.
  __device__ MaskFragment<kKeys> mask_of(int block) const {
    return {mask_tile(), a.terms.element, ptx::opaque(thread_row(block)) - shared.q_tile.q_start, fragment_column()};
  }
  __device__ void load_mask(int tile, bool zeros) const;
  // Returns whether the mask adds 0 to all logits of a tile of this warp; any answer will do for tiles before the
  // first.
  __device__ bool has_zeros(int tile) const {
    return shared.mask_classes[ptx::opaque(static_cast<int>(threadIdx.x)) / 32][max(tile, 0)] == kZeros;
  }

  static constexpr int kExponent = Operands::kExponent;
  __device__ void start_rows(Softmax (&softmax)[kRowBlocks], O& o) const;
  // `zeros`: the mask is 0 in the tile. As a value it would have instructions of its own.
  __device__ void take_logits(S& s, int tile, const bool& zeros) const;
  static __device__ bool fits_beside_sum(const Softmax& softmax, const RowValues& most);
  static __device__ bool fits_stale_max(const S& s, const Softmax (&softmax)[kRowBlocks],
                                        RowValues (&most)[kRowBlocks]);
  __device__ void take_exp(S& s, int tile, const bool& zeros, Softmax (&softmax)[kRowBlocks], O& o, P& p) const;
  __device__ void drop_from(P& p, int tile) const;
  static __device__ bool take_exp_of_stale_max(S& s, Softmax (&softmax)[kRowBlocks]);

  // The words in which this thread keeps a of the sign flip: those of a row of the output.
  __device__ uint32_t* saved(int row) const;
  __device__ void flip(const Softmax (&softmax)[kRowBlocks], O& o) const;
  __device__ void unflip(const Softmax (&softmax)[kRowBlocks], O& o) const;

  __device__ bool join_key_warps(Softmax (&softmax)[kRowBlocks], O& o) const;
  __device__ void write(const Softmax (&softmax)[kRowBlocks], O& o) const;
  template <class T>
  __device__ void write_as(int row, OTile& o) const;
  __device__ void recompute_rows(int block) const;
};

}  // namespace octet::cuda::sm80
