#include <algorithm>

#include "cuda/bwd/operands.h"
#include "cuda/bwd/wide_tiles.h"
#include "cuda/host/card.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/masks.h"
#include "cuda/scheduler/count_blocks.h"

namespace octet::cuda {
namespace {

// The rows of the tiles of q, and of k.
struct TileRows {
  int queries, keys;
};
TileRows tile_rows(int dim) {
  return with_wide_tile_dim(dim, [](auto d) { return TileRows{BackwardTile<d>::kQueries, BackwardTile<d>::kKeys}; });
}

// Returns the size of QueryRows for tiles of `queries` queries.
std::size_t row_bytes(int queries) { return queries == 64 ? sizeof(QueryRows<64>) : sizeof(QueryRows<128>); }

}  // namespace

Blocks blocks_of(int rows, int64_t tokens, const View& cu_seqlens, WorkspaceAllocator& allocator) {
  Blocks b{.rows = rows, .tokens = static_cast<int>(tokens), .count = static_cast<int>((tokens + rows - 1) / rows)};
  if (!cu_seqlens.present()) return b;
  b.sequences = static_cast<int>(cu_seqlens.shape[3] - 1);
  b.count += b.sequences;
  b.cu_seqlens = static_cast<const int*>(cu_seqlens.data);
  b.blocks_before = allocator.take<int>(b.sequences + 1);
  return b;
}

void count_blocks(const Blocks& q, const Blocks& k, cudaStream_t stream) {
  for (const Blocks* b : {&q, &k})
    if (b->cu_seqlens) count_blocks(b->cu_seqlens, b->sequences, b->rows, const_cast<int*>(b->blocks_before), stream);
}

PreprocessParams preprocess_params(const Problem& p, const BackwardChoice& choice, bool query_tiles, bool key_tiles,
                                   WorkspaceAllocator& allocator) {
  const int dim = choice.dim;
  const TileRows rows = tile_rows(dim);
  const Blocks q_blocks = blocks_of(rows.queries, p.tokens_q, p.cu_seqlens_q, allocator);
  const Blocks k_blocks = blocks_of(rows.keys, p.tokens_k, p.cu_seqlens_k, allocator);
  const auto q_tiles = static_cast<std::size_t>(p.batch * p.heads * q_blocks.count);
  const auto k_tiles = static_cast<std::size_t>(p.batch * p.kv_heads * k_blocks.count);
  const auto kv_heads = static_cast<std::size_t>(p.batch * p.kv_heads);
  const std::size_t q_bytes = q_tiles * rows.queries * dim * 2, k_bytes = k_tiles * rows.keys * dim * 2;

  const bool scaled = choice.f16;
  const octet_dtype cast = choice.cast;
  PreprocessParams params{
      .q = strided(p.q),
      .k = strided(p.k),
      .v = strided(p.v),
      .do_ = strided(p.do_),
      .o = strided(p.o),
      .o_residual = choice.exact_o ? strided(p.o_residual) : strided(View{}),
      .lse = strided(p.lse),
      .dlse = strided(p.dlse),
      .sinks = sinks(p.sinks),
      .tile_dim = dim,
      .block_channels = dim / 2,
      .block_channels_v = dim / 2,
      .type = scaled ? OCTET_F16 : OCTET_BF16,
      .round_do = cast == OCTET_BF16 ? OCTET_BF16 : OCTET_F32,
      .round_q = cast,
      .round_k = cast,
      .round_v = cast,
      .scaled = scaled,
      .smooth = choice.smooth,
      .measures_all_keys = key_tiles || choice.sums == Sums::integers,
      .q_blocks = q_blocks,
      .k_blocks = k_blocks,
      .mask = mask_of(p),
      .group = static_cast<int>(p.group()),
      .scale = p.scale,
      .dropout_scale = static_cast<float>(p.dropout_scale()),
      .sampled = allocator.take<Sizes>(kv_heads),
      .sizes = allocator.take<Sizes>(kv_heads),
      .exponents = allocator.take<Exponents>(kv_heads * kBins),
      .divided = allocator.take<unsigned>(1 + kv_heads),
      .mean = allocator.take<float>(kv_heads * p.dim),
      .rows = allocator.take<unsigned char>(q_tiles * row_bytes(rows.queries) * (scaled ? kBins : 1)),
      .row_sums = choice.adds_mean ? allocator.take<float>(q_tiles * rows.queries) : nullptr,
      .dq = allocator.take<float>(q_tiles * rows.queries * dim),
      .zeroed_heads = static_cast<int>(kv_heads),
      .zeroed = allocator.take<unsigned>(kv_heads),
      .counters = allocator.take<unsigned>(2)};
  if (query_tiles) {
    params.q_tiles = allocator.take<unsigned char>(q_bytes);
    params.do_tiles = allocator.take<unsigned char>(q_bytes);
  }
  if (key_tiles) {
    params.k_tiles = allocator.take<unsigned char>(k_bytes);
    if (!choice.int8) params.v_tiles = allocator.take<unsigned char>(k_bytes);
  }
  if (choice.int8) params.int8.scales = allocator.take<float>(q_tiles * rows.queries * 2);
  if ((choice.int8 || choice.blocks) && p.sinks.present())
    params.int8.mean_delta = allocator.take<float>(q_tiles * rows.queries);
  return params;
}

BackwardParams backward_params(const Problem& p, const PreprocessParams& params, int in_flight, const Output& dk,
                               const Output& dv) {
  const int64_t share_of_l2 = card(p.device_index).l2_bytes * 8 / 25;
  const int64_t head_bytes = std::max<int64_t>(p.group() * p.tokens_q * params.tile_dim * (2 + 2 + 4), 1);
  const int64_t kv_heads = p.batch * p.kv_heads;
  return {.q = params.q_tiles,
          .k = params.k_tiles,
          .v = params.v_tiles,
          .do_ = params.do_tiles,
          .k_rows = {},
          .v_rows = {},
          .rows_are_bf16 = p.k.dtype == OCTET_BF16,
          .k_mean = params.mean,
          .mean_dim = static_cast<int>(p.dim),
          .rows = params.rows,
          .dq = params.dq,
          .zeroed_heads = params.zeroed_heads,
          .zeroed = params.zeroed,
          .exponents = params.exponents,
          .divided = params.divided,
          .q_blocks = params.q_blocks,
          .k_blocks = params.k_blocks,
          .mask = params.mask,
          .batch = static_cast<int>(p.batch),
          .heads = static_cast<int>(p.heads),
          .kv_heads = static_cast<int>(p.kv_heads),
          .dim = static_cast<int>(p.dim),
          .dim_v = static_cast<int>(p.dim_v),
          .block_channels = params.block_channels,
          .counter = params.counters,
          .head_groups = p.windowed
                             ? head_groups_of(kv_heads, params.k_blocks.count, share_of_l2 / head_bytes, in_flight)
                             : one_by_one(kv_heads),
          .scale = p.scale,
          .dk = dk,
          .dv = dv,
          .row_sums = params.row_sums};
}

}  // namespace octet::cuda
