#include "cuda/bwd/exponents.h"
#include "cuda/host/launch.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/vec8.h"
#include "cuda/sm80/bwd/block_tiles.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kThreads = 256;

struct TilesParams {
  PreprocessParams tiles;
  const S8 *q, *k, *do_;            // [batch, head, row, dim], of k in tiles of kScaledKeys
  int keys;                         // rows of a head of k
  const float *q_scale, *do_scale;  // [batch, head, token]
  const float* mean_logit;          // [batch, head, token]: is taken from lse; null: nothing is
  unsigned char* do_values;
  Strided lse;  // the saved one
};

// Eight values as f16.
__device__ uint4 to_f16(uint2 word) {
  const auto* const values = reinterpret_cast<const S8*>(&word);
  uint4 result;
  for (int i = 0; i < kVec8 / 2; ++i) (&result.x)[i] = ptx::pack<F16>(values[2 * i], values[2 * i + 1]);
  return result;
}

// Sets the numbers of a word of f16 that are not finite to 0.
__device__ void clear_nonfinite(uint4& word) {
  constexpr unsigned kExponent = 0x7c00;
  for (int i = 0; i < 4; ++i) {
    uint32_t& x = (&word.x)[i];
    if ((x & kExponent) == kExponent) x &= 0xffff0000u;
    if ((x >> 16 & kExponent) == kExponent) x &= 0xffffu;
  }
}

// The bytes from the start of a tile of `rows` rows to eight columns of a row.
__device__ int64_t offset_in_tile(int rows, int row, int vec) {
  return vec / kSwizzleRows * rows * kPanelRowBytes + row * kPanelRowBytes +
         (vec % kSwizzleRows ^ row % kSwizzleRows) * 16;
}

template <int Dim>
struct BlockTileWriter {
  static constexpr int kVecs = Dim / kVec8, kQueries = BackwardTile<Dim>::kQueries, kKeys = BackwardTile<Dim>::kKeys;

  const TilesParams& a;
  const PreprocessParams& p = a.tiles;

  // Writes the tile of a block of queries of (batch, head) `head`.
  __device__ void queries(int head, int block) const {
    const Blocks::Sequence sequence = p.q_blocks.sequence_of(block);
    const int64_t tile = int64_t{head} * p.q_blocks.count + block, start = tile * kQueries * Dim * int64_t{sizeof(F16)};
    const int first = (block - sequence.first_block) * kQueries;
    const int64_t first_token = int64_t{head} * p.q.shape[2] + sequence.first + first;
    for (int i = threadIdx.x; i < kQueries * kVecs; i += kThreads) {
      const int row = i / kVecs, vec = i % kVecs;
      const bool present = sequence.index >= 0 && first + row < sequence.tokens;
      const int64_t from = (first_token + row) * Dim + vec * kVec8, to = start + offset_in_tile(kQueries, row, vec);
      uint2 q{}, do_{};
      if (present) q = *reinterpret_cast<const uint2*>(a.q + from), do_ = *reinterpret_cast<const uint2*>(a.do_ + from);
      *reinterpret_cast<uint4*>(p.q_tiles + to) = to_f16(q);
      *reinterpret_cast<uint4*>(a.do_values + to) = to_f16(do_);
      clear_nonfinite(*reinterpret_cast<uint4*>(p.do_tiles + to));
    }
    const int row = threadIdx.x;
    if (row >= kQueries || sequence.index < 0 || first + row >= sequence.tokens) return;
    const int64_t token = first_token + row, tiles = p.q.shape[0] * p.q.shape[1] * p.q_blocks.count;
    const float delta = rows_at<kQueries>(p.rows, 0, tiles, tile).delta[row];
    const bool finite = isfinite(delta + (a.q_scale[token] + a.do_scale[token]));
    const float lacks = a.mean_logit ? p.scale * 1.44269504f * a.mean_logit[token] : 0.f;
    const Exponents& e = p.exponents[head / p.group];
    bool sees = false;
    for (int bin = 0; bin < e.bins; ++bin) {
      auto& rows = rows_at<kQueries>(p.rows, bin, tiles, tile);
      if (!finite) rows.delta[row] = 0.f;
      if (rows.lse[row] == INFINITY) continue;
      rows.lse[row] = finite ? rows.lse[row] - lacks : NAN;
      sees = true;
    }
    if (p.row_sums && p.sinks.data && sees)
      p.row_sums[tile * kQueries + row] = row_sum(head, sequence.first + first + row, delta, e);
    if (p.int8.mean_delta) p.int8.mean_delta[tile * kQueries + row] = finite ? 0.f : NAN;
  }

  // Returns the sum of a row of ds from its delta less dlse, which has the scale of dp.
  __device__ float row_sum(int head, int64_t token, float delta, const Exponents& e) const {
    const int heads = static_cast<int>(p.q.shape[1]);
    const Index4 at{head / heads, head % heads, token, 0};
    const float dlse = p.dlse.data ? static_cast<const float*>(p.dlse.data)[at.offset(p.dlse)] : 0.f;
    const float share =
        expf(p.sinks.at(head / heads, head % heads) - static_cast<const float*>(a.lse.data)[at.offset(a.lse)]);
    return fmaf(share, delta / power_of_two(e.do_ + e.v + e.product), dlse);
  }

  // Writes the tile of a block of keys of (batch, kv head) `head`.
  __device__ void keys(int head, int block) const {
    const Blocks::Sequence sequence = p.k_blocks.sequence_of(block);
    const int64_t start = (int64_t{head} * p.k_blocks.count + block) * kKeys * Dim * int64_t{sizeof(F16)};
    const int first = (block - sequence.first_block) * kKeys;
    const int64_t first_row =
        int64_t{head} * a.keys + (sequence.first / kScaledKeys + max(sequence.index, 0)) * kScaledKeys + first;
    for (int i = threadIdx.x; i < kKeys * kVecs; i += kThreads) {
      const int row = i / kVecs, vec = i % kVecs;
      const bool present = sequence.index >= 0 && first + row < sequence.tokens;
      const int64_t to = start + offset_in_tile(kKeys, row, vec);
      uint2 k{};
      if (present) k = *reinterpret_cast<const uint2*>(a.k + (first_row + row) * Dim + vec * kVec8);
      *reinterpret_cast<uint4*>(p.k_tiles + to) = to_f16(k);
      clear_nonfinite(*reinterpret_cast<uint4*>(p.v_tiles + to));
    }
  }
};

// Tiles of keys are numbered after those of queries.
template <int Dim>
__global__ void __launch_bounds__(kThreads) block_tiles_kernel(const __grid_constant__ TilesParams a, int q_tiles) {
  const BlockTileWriter<Dim> writer{a};
  const int tile = static_cast<int>(blockIdx.x), q_blocks = a.tiles.q_blocks.count, k_blocks = a.tiles.k_blocks.count;
  if (tile < q_tiles)
    writer.queries(tile / q_blocks, tile % q_blocks);
  else
    writer.keys((tile - q_tiles) / k_blocks, (tile - q_tiles) % k_blocks);
}

}  // namespace

BlockInputs::BlockInputs(const Problem& p, const BackwardChoice& choice, const PreprocessParams& params,
                         WorkspaceAllocator& workspace)
    : seen_(p, ReadsK::seen, workspace),
      logits_(p, {.k = seen_.k(), .v = seen_.k(), .seen = seen_.seen(), .blocks = true}, choice.dim, kScaledKeys,
              workspace),
      do_{.from = params.do_,
          .blocks = query_blocks(logits_.key_tiles(), kScaledTile),
          .keys = logits_.key_tiles(),
          .of_queries = true,
          .dim = choice.dim,
          .kv_heads = static_cast<int>(p.kv_heads)},
      softcap_(p.softcap != 0.f),
      adds_mean_(choice.sums_rows) {
  do_.to = workspace.take<signed char>(do_.count() * do_.dim);
  do_.scale = workspace.take<float>(do_.count());
  do_.block_scale = workspace.take<float>(do_.block_count());
  do_values_ = workspace.take<unsigned char>(static_cast<std::size_t>(p.batch * p.heads * params.q_blocks.count) *
                                             params.q_blocks.rows * do_.dim * sizeof(F16));
}

void BlockInputs::quantize(cudaStream_t stream) const {
  seen_.preprocess(stream);
  logits_.quantize(stream);
  quantize_blocks(do_, stream);
}

void BlockInputs::write_tiles(const PreprocessParams& params, const Strided& saved_lse, cudaStream_t stream) const {
  const TilesParams a{.tiles = params,
                      .q = static_cast<const S8*>(logits_.q().data),
                      .k = static_cast<const S8*>(logits_.k().data),
                      .do_ = static_cast<const S8*>(do_.to),
                      .keys = logits_.keys(),
                      .q_scale = logits_.q_scale(),
                      .do_scale = do_.scale,
                      .mean_logit = softcap_ ? nullptr : logits_.mean_logit(),
                      .do_values = do_values_,
                      .lse = saved_lse};
  const int64_t q_tiles = params.q.shape[0] * params.q.shape[1] * params.q_blocks.count,
                k_tiles = params.k.shape[0] * params.k.shape[1] * params.k_blocks.count;
  if (!(q_tiles + k_tiles)) return;
  const auto kernel = do_.dim == 64 ? block_tiles_kernel<64> : block_tiles_kernel<128>;
  kernel<<<static_cast<unsigned>(q_tiles + k_tiles), kThreads, 0, stream>>>(a, static_cast<int>(q_tiles));
  check(cudaGetLastError(), "block_tiles_kernel");
}

BlockOperands::Terms BlockInputs::terms() const {
  return {.do_values = do_values_,
          .q_scale = logits_.q_block_scale(),
          .k_scale = logits_.k_block_scale(),
          .do_scale = do_.block_scale,
          .q_blocks = query_blocks(logits_.key_tiles(), kScaledQueries).count(),
          .k_blocks = logits_.key_tiles().count(),
          .do_blocks = do_.blocks.count(),
          .mean_logit = softcap_ ? logits_.mean_logit() : nullptr,
          .k_mean = logits_.channels().k_mean,
          .adds_mean = adds_mean_};
}

}  // namespace octet::cuda::sm80
