// The backward pass: dq, dk, dv for one block of keys of one kv head (FlashAttention-2, arXiv 2307.08691, algorithm 2):
//
//   for each tile of queries that sees the block, for each head of the group:
//     p = exp(scale q k^T - lse)      ds = p (do v^T - delta)
//     dv += p^T do    dk += ds^T q    dq(tile) += ds k
//
// The warps divide each product among them. p and ds, rounded to 16 bits, pass through shared memory, as the products
// sum over rows that other warps have; where keys are the rows of s and dp (mainloop_by_keys.h), dv and dk take what
// they can from registers. q of the next iteration is loaded during this one; do, where it has one stage, once dv has
// read it. dq is summed over blocks of keys by atomics in L2.
//
// The operands are the tiles that cuda/bwd writes, with the exponents of their (batch, kv head), and the sums of
// dq have the layout that it reads. The queries of a head whose rows of do differ by more than the range of f16 come in
// several bins, each with its own exponents; the thread block computes one after the other.
#pragma once
#include "cuda/bwd/schedule.h"
#include "cuda/fragment/dropout.h"
#include "cuda/sm80/bwd/config.h"
#include "cuda/sm80/bwd/operands_8bit.h"
#include "cuda/sm80/bwd/operands_blocks.h"
#include "cuda/sm80/mask_classes.h"
#include "cuda/sm80/mask_tile.h"
#include "cuda/sm80/mma.h"

namespace octet::cuda::sm80 {

struct KernelParams {
  BackwardParams a;
  bool integers;  // dq is summed in integers
  LogitTerms terms;
  MaskClasses mask_classes;  // of masked logits
  Int8Operands::Terms int8;
  BlockOperands::Terms blocks;
  Dropout dropout;  // of kernels with general logits
};

template <class Kind>
struct Backward {
  using Operands = typename Kind::Operands;
  using T = typename Operands::Element;
  using C = typename Kind::Config;
  static constexpr int kDim = Kind::kDim;
  static constexpr bool kPlain = Kind::kLogits == Logits::plain, kMasked = Kind::kLogits == Logits::masked,
                        kGeneral = Kind::kLogits == Logits::general;
  using Tiles = BackwardTile<kDim>;  // of preprocessing; a tile of this kernel is a part of one
  static constexpr int kQueries = C::kQueries, kKeys = C::kKeys, kStages = C::kStages, kDoStages = C::kDoStages;
  static constexpr int kBuffers = C::kBuffers;
  // lse and delta have kStages. q has as many, and the row bias has those of keys as rows, or each has its own.
  static constexpr int kQStages = C::kQStages ? C::kQStages : kStages;
  static constexpr int kBiasStages = C::kKeysAsRows ? kStages : C::kBiasStages;
  static __device__ int bias_stage(int stage) { return kBiasStages > 1 ? stage : 0; }
  static constexpr int kThreads = 32 * C::kWarps;
  // The threads that load q and do: a panel of theirs has a chunk for each.
  static constexpr int kPanelChunks = kQueries * kPanelRowBytes / kChunkBytes;
  static constexpr int kLoaders = kThreads < kPanelChunks ? kThreads : kPanelChunks;
  static constexpr int kTilesOfQueryBlock = Tiles::kQueries / kQueries, kTilesOfKeyBlock = Tiles::kKeys / kKeys;

  using TileQ = PanelTile<T, kQueries, kDim>;
  using TileK = PanelTile<T, kKeys, kDim>;
  // The rows of s and dp, and the columns that all warps compute at a time: where keys are rows, 32 queries each.
  static constexpr int kSRows = C::kKeysAsRows ? kKeys : kQueries;
  static constexpr int kSColumns = C::kKeysAsRows ? 32 * C::kWarps / C::kKeyWarpRows : kKeys;
  // True: a product of s and dp is the sum of parts, which warps find in their channels (mainloop_wide.h).
  static constexpr bool kWide = C::kChannelWarps > 1;
  // The warps that find p and ds: then each has one block of 16 queries and keys.
  static constexpr int kSWarps = kWide ? kQueries / 16 * (kKeys / 16) : C::kWarps;
  using PartS = WarpPart<kSRows, kSColumns, kSWarps, C::kKeysAsRows ? C::kKeyWarpRows : C::kSWarpRows>;
  // True: p passes through shared memory. Where keys are rows, and a warp has all queries of its keys, no other warp
  // reads its p.
  static constexpr bool kSharesP = !C::kKeysAsRows || PartS::kWarpColumns > 1;
  static constexpr int kPColumns = C::kKeysAsRows ? kQueries : kKeys;
  using TileP = PanelTile < T, kSRows, kPColumns<kPanelColumns ? kPanelColumns : kPColumns>;
  using PartK = WarpPart<kKeys, kDim, C::kWarps, C::kKeyWarpRows>;
  using PartDq = WarpPart<kQueries, kDim, C::kWarps, C::kDqWarpRows>;
  using TileS = Accumulator<PartS::kColumns>[PartS::kBlocks];
  using OperandS = Operand<T, PartS::kColumns>[PartS::kBlocks];
  using TileDk = Accumulator<PartK::kColumns>[PartK::kBlocks];
  // With kDqHalves, a warp computes the columns of its part of dq in two halves.
  static constexpr int kDqColumns = PartDq::kColumns / (C::kDqHalves ? 2 : 1);
  using TileDq = Accumulator<kDqColumns>[PartDq::kBlocks];
  using Rows = QueryRows<Tiles::kQueries>;
  static constexpr int kChannels = kDim / C::kChannelWarps;  // of a part of s and dp
  using SPart = Accumulator<16>[kQueries / 16];              // of 16 keys
  struct VPart {
    uint32_t x[kWide ? kChannels / kStepColumns<T> : 1][4];
  };
  static constexpr int kPartNumbers = kWide ? C::kChannelWarps * kQueries * kKeys : 0;
  // The rows and columns of a mask tensor that are in shared memory: where keys are rows, 32 queries of 32 keys for
  // each warp.
  static constexpr int kMaskRows = C::kKeysAsRows ? kThreads : kQueries, kMaskColumns = C::kKeysAsRows ? 32 : kKeys;
  // Masks of f32 have no room beside keys as rows in 99 KB, nor beside tiles of 64 queries and keys at 128.
  static constexpr int kMostMaskBytes = C::kKeysAsRows || (Operands::kTileScales && kDim == 128) ? 2 : 4;

  // A tile of queries of one head.
  struct Step {
    int tile;   // of preprocessing, among those of all heads
    int first;  // its first query within that tile
    int query;  // and within the sequence
    int head;   // of q
  };
  // The iterations whose steps are known: the current one, one that slower warps are still in, and two to come.
  static constexpr int kSteps = 4;
  static_assert(kStages < kSteps);

  struct Shared {
    unsigned char k[TileK::kBytes], v[Operands::kReadsV && !kWide ? TileK::kBytes : 0];
    unsigned char q[kQStages][TileQ::kBytes], do_[kDoStages][TileQ::kBytes];
    alignas(128) unsigned char p[kBuffers][kSharesP ? TileP::kBytes : 0];
    unsigned char ds[kBuffers][TileP::kBytes];
    alignas(16) float s_parts[kPartNumbers], dp_parts[kPartNumbers];
    float lse[kStages][kQueries], delta[kStages][kQueries];
    [[no_unique_address]] typename Operands::template Shared<Backward> operands;
    KeyBlockInfo key_block;
    Exponents exponents;  // of the bin
    // The factors of s (with log2 e) and of dp.
    float scale_log2, product_scale;
    float q_k_scale;  // s times this is q.k
    float dq_scale;   // brings dq of this bin to the scale of the first bin
    int group;        // heads of q for each kv head
    int iterations;
    Step steps[kSteps];
    // The row biases of the current tile of a mask tensor; that tile lies in memory after this struct.
    alignas(C::kKeysAsRows ? 8 : 4) float row_bias[kBiasStages][!kPlain ? kQueries : 1];
    int mask_class[kMasked ? kSteps : 0];
  };
  static constexpr int kSharedBytes = (sizeof(Shared) + kChunkBytes - 1) / kChunkBytes * kChunkBytes;
  static_assert(Kind::kMemory == SharedMemory::large ||
                kSharedBytes + (!kPlain ? kMaskRows * mask_row_bytes(kMaskColumns, kMostMaskBytes) : 0) <=
                    kMostSharedBytes);

  const KernelParams& params;
  const BackwardParams& a;
  Shared& shared;
  int warp, lane;
  const KeyBlockInfo& w;
  const Exponents& e;

  // Returns the same kernel; with factors of rows, one for which the compiler keeps no addresses in registers.
  __device__ Backward without_addresses() const {
    if constexpr (!Operands::kScalesRows) return *this;
    return {params, a, shared, ptx::opaque(warp), ptx::opaque(lane), w, e};
  }

  // Computes the block of keys `number`.
  __device__ void run(unsigned number);

  __device__ void load_keys() const;
  __device__ void next_bin();
  __device__ int sequence() const { return a.k_blocks.cu_seqlens ? w.k.index : w.batch; }
  __device__ MBlock first_tile() const { return {w.tiles.start, 0}; }
  __device__ Step next_step(MBlock& at, int n) const;
  // Starts the copy of a tile of q or do.
  __device__ void load_queries(unsigned char* to, const unsigned char* tiles, const Step& step) const {
    constexpr int64_t kBytes = Tiles::kQueries * kDim * sizeof(T);
    if (kLoaders == kThreads || threadIdx.x < kLoaders)
      load_async<kLoaders, Tiles::kQueries>(TileQ{to}, tiles + step.tile * kBytes, step.first);
  }
  __device__ void load_q(const Step& step, int stage) const;
  __device__ void load_do(const Step& step, int stage) const;
  __device__ bool has_mask_tile() const { return !kPlain && params.terms.mask && params.terms.mask_chunks; }
  __device__ unsigned char* mask_tile() const { return reinterpret_cast<unsigned char*>(&shared) + kSharedBytes; }
  __device__ const int* mask_classes(int head, int tile) const {
    return params.mask_classes.of(w.batch, head, tile) + w.first_key / kKeys;
  }
  __device__ void skip_hidden_queries() const;
  __device__ void load_mask_class(const MBlock& at, int n) const;
  __device__ bool needs_mask_tile(int n) const { return !kMasked || shared.mask_class[n % kSteps] != kZeros; }
  __device__ void load_mask(const Step& step, bool tile, int stage = 0) const;
  __device__ unsigned char* mask_tile_by_keys() const;
  __device__ void load_row_biases(const Step& step, int stage) const;
  __device__ void load_mask_by_keys(int n, int pass) const;
  __device__ void add_mask_by_keys(TileS& s, int n, int pass) const;
  __device__ void add_mask_tile(TileS& s, float scale, bool needs_tile, int stage) const;
  __device__ void compute(TileDk& dk, TileDk& dv);
  __device__ void compute_by_keys(TileDk& dk, TileDk& dv);
  __device__ VPart take_v() const;
  __device__ void multiply_parts(const VPart& v, int stage) const;
  __device__ int key_block() const { return ptx::opaque(warp) % (kKeys / 16); }
  __device__ int channel_part() const { return ptx::opaque(warp) / (kKeys / 16); }
  __device__ void put_part(const SPart& x, float* parts) const;
  __device__ void add_parts(TileS& x, const float* parts) const;
  __device__ void find_p_and_ds(const Step& step, int stage) const;
  __device__ void compute_wide(const VPart& v, TileDk& dk, TileDk& dv);
  __device__ void take_p_by_keys(TileS& s, int first, int stage) const;
  __device__ void hide_by_keys(TileS& p, int query) const;
  __device__ void take_ds_by_keys(const TileS& p, TileS& dp, int first, int stage) const;
  // Returns what dp of this thread's rows is multiplied by.
  __device__ RowValues product_scales(int stage, int block) const {
    const int row = 16 * (PartS::row_block(warp) + block) + lane / 4;
    if constexpr (Operands::kScalesRows)
      return {Operands::row_scale(*this, stage, row), Operands::row_scale(*this, stage, row + 8)};
    const float scale = shared.product_scale;
    return {scale, scale};
  }
  // Returns the same for columns `first` and the next, where keys are rows.
  __device__ float2 product_scales_by_keys(int stage, int first) const {
    if constexpr (Operands::kScalesRows)
      return {Operands::row_scale(*this, stage, first), Operands::row_scale(*this, stage, first + 1)};
    const float scale = shared.product_scale;
    return {scale, scale};
  }
  __device__ void take_p(TileS& s, int stage) const;
  __device__ void hide(TileS& p, int query) const;
  __device__ void take_ds(const TileS& p, TileS& dp, int stage) const;
  using Kept = KeptElements<PartS::kColumns, RowTokens::queries>[PartS::kBlocks];
  __device__ void find_kept(const Step& step, Kept& kept) const;
  __device__ void drop_from(TileS& x, const Kept& kept) const {
    if (params.dropout.seed) drop(x, kept);
  }
  __device__ void add_logit_terms(TileS& s, TileS& dp, const Step& step, int stage) const;
  __device__ void multiply_tiles(TileDk& dk, TileDk& dv, int n, const TileScales& by) const;
  __device__ void store(const OperandS& x, unsigned char* tile, int column_block) const;
  __device__ void store(const TileS& x, unsigned char* tile) const;
  __device__ bool needs_mask(int query) const;
  static constexpr int kDqQuads = PartDq::kBlocks * kDqColumns / 8;  // of four sums of a thread
  template <int AtOnce>
  __device__ int64_t sums_of(const Step& step) const;
  // opaque() stops the compiler from computing the address once more for each number. It also hides that they are in
  // global memory: additions would wait for an answer to that, each of them.
  __device__ float* float_sums(const Step& step) const {
    const float* const sums =
        ptx::opaque(static_cast<const float*>(a.dq) + sums_of<kSumsAtOnce<kDim, Sums::floats>>(step));
    __builtin_assume(__isGlobal(sums));
    return const_cast<float*>(sums);
  }
  template <int AtOnce>
  static __device__ int sums_of_quad(int half, int quad);
  __device__ void add_floats(const TileDq& dq, float* sums, float scale, int half, int quad) const;
  __device__ void add_share(const TileDq& dq, float* sums, float scale, int share, int shares) const;
  __device__ void add_integers(const TileDq& dq, const Step& step, int half) const;
  __device__ void add(const TileDq& dq, const Step& step, int half) const;
  __device__ void write(const Output& out, TileDk& x, float scale, int exponent, int columns) const;
};

}  // namespace octet::cuda::sm80
