#include "core/recipe.h"
#include "cuda/host/launch.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/masks.h"
#include "cuda/operands/mean_limit.h"
#include "cuda/operands/quantize/key_tiles.h"
#include "cuda/operands/quantize/smooth_q.h"
#include "cuda/operands/vec8.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = kSmoothedQueries, kMostDim = 256;
static_assert(kSmoothedQueries == kQueryBlock);

struct CentreParams {
  Strided q, to;
  KeyTiles q_blocks, keys;
  TokenFlags seen;  // by the mask tensor; null: there is none
  int dim;
  float* means;
};

// A thread block has a block of a (batch, head), a thread a query.
__global__ void __launch_bounds__(kThreads) centre_kernel(const __grid_constant__ CentreParams p) {
  constexpr int kSampled = 64, kWarps = kThreads / 32;
  __shared__ int tokens[kThreads], of_warp[kWarps];
  __shared__ float largest[kSampled], limit, sums[kThreads * kVec8], mean[kMostDim];
  const int heads = static_cast<int>(p.q.shape[1]), blocks = p.q_blocks.count(),
            batch_head = static_cast<int>(blockIdx.x) / blocks, batch = batch_head / heads, head = batch_head % heads;
  const TokenBlock block = block_of(p.q_blocks, static_cast<int>(blockIdx.x) % blocks);
  const int thread = threadIdx.x, warp = thread / 32;
  bool seen = thread < block.tokens;
  if (seen) {
    const Interval keys = p.keys.mask.keys_of(block.within + thread, tokens_of(p.q_blocks, block.sequence),
                                              tokens_of(p.keys, block.sequence));
    seen = keys.first < keys.last && (!p.seen.data || p.seen.of(batch, head)[block.first + thread]);
  }
  const unsigned votes = __ballot_sync(~0u, seen);
  if (thread % 32 == 0) of_warp[warp] = __popc(votes);
  __syncthreads();
  int before = 0, count = 0;
  for (int w = 0; w < kWarps; ++w) before += w < warp ? of_warp[w] : 0, count += of_warp[w];
  if (seen) tokens[before + __popc(votes & ((1u << thread % 32) - 1))] = block.first + thread;
  __syncthreads();
  Index4 at{batch, head, 0, 0};
  const int sampled = min(count, kSampled), dim = static_cast<int>(p.q.shape[3]);
  if (thread < kSampled) {
    float most = 0.f;
    if (thread < sampled) {
      at.token = tokens[thread * count / sampled];
      for (at.channel = 0; at.channel < dim; at.channel += kVec8) {
        Vec8 x;
        read(p.q, at, x);
        most = fmaxf(most, largest_finite(x));
      }
    }
    largest[thread] = most;
  }
  const float below = mean_limit(largest, limit);

  const int lanes = p.dim / kVec8, rows = kThreads / lanes, channel = thread % lanes * kVec8;
  Vec8 sum{};
  at.channel = channel;
  for (int i = thread / lanes; i < count && channel < dim; i += rows) {
    at.token = tokens[i];
    Vec8 x;
    read(p.q, at, x);
    for (int c = 0; c < kVec8; ++c) sum[c] += fabsf(x[c]) < below ? x[c] : 0.f;
  }
  for (int c = 0; c < kVec8; ++c) sums[thread * kVec8 + c] = sum[c];
  __syncthreads();
  float* const to = p.means + int64_t{blockIdx.x} * p.dim;
  for (int c = thread; c < p.dim; c += kThreads) {
    float all = 0.f;
    for (int row = 0; row < rows; ++row) all += sums[row * p.dim + c];
    mean[c] = to[c] = all / static_cast<float>(max(count, 1));
  }
  __syncthreads();
  for (int i = thread / lanes; i < block.tokens && channel < dim; i += rows) {
    at.token = block.first + i;
    Vec8 x;
    read(p.q, at, x);
    for (int c = 0; c < kVec8; ++c) x[c] -= mean[channel + c];
    write(p.to, at, x);
  }
}

struct MultiplyParams {
  Strided k;
  KeyTiles q_blocks, keys;
  int heads, kv_heads, dim;
  const float *means, *k_mean;
  BlockLogits to;
};

// The sequence and head of a mean of k.
__device__ const float* mean_of(const float* k_mean, bool packed, int batch, int sequence, int kv_heads, int kv_head,
                                int dim) {
  return k_mean + (static_cast<int64_t>(packed ? sequence : batch) * kv_heads + kv_head) * dim;
}

// `runs` thread blocks have a (batch, head), and a group of lanes has a key, whose products with the means of all
// blocks of its sequence it finds. The keys of a warp lie in one tile.
constexpr int kMultiplyThreads = 256;
__global__ void __launch_bounds__(kMultiplyThreads)
    multiply_kernel(const __grid_constant__ MultiplyParams p, int runs) {
  const int lanes = p.dim / kVec8, lane = threadIdx.x % lanes, rows_at_once = kMultiplyThreads / lanes;
  const int batch_head = static_cast<int>(blockIdx.x) / runs, batch = batch_head / p.heads, head = batch_head % p.heads,
            kv_head = head / (p.heads / p.kv_heads);
  const int row = static_cast<int>(blockIdx.x) % runs * rows_at_once + static_cast<int>(threadIdx.x) / lanes;
  const TileOfKeys tile = tile_of_keys(p.keys, row / p.keys.tile);
  const int i = row % p.keys.tile;
  const bool packed = p.keys.cu_seqlens, present = tile.sees(i);
  const int start = packed ? p.keys.cu_seqlens[tile.sequence] : 0, key = tile.first - start + i;
  Vec8 x{};
  const Index4 at{batch, kv_head, tile.first + i, lane * kVec8};
  if (present && at.channel < p.k.shape[3]) {
    read(p.k, at, x);
    const float* const mean = mean_of(p.k_mean, packed, batch, tile.sequence, p.kv_heads, kv_head, p.dim);
    for (int c = 0; c < kVec8; ++c) x[c] -= mean[at.channel + c];
  }
  const int first = packed ? first_tile(p.q_blocks, tile.sequence) : 0;
  const int queries = tokens_of(p.q_blocks, tile.sequence), count = (queries + p.q_blocks.tile - 1) / p.q_blocks.tile;
  const int64_t of_head = int64_t{batch_head} * p.to.blocks;
  for (int block = first; block < first + count; ++block) {
    const auto* const mean = reinterpret_cast<const float4*>(p.means + (of_head + block) * p.dim + at.channel);
    const float4 low = mean[0], high = mean[1];
    float sum = x[0] * low.x + x[1] * low.y + x[2] * low.z + x[3] * low.w;
    sum += x[4] * high.x + x[5] * high.y + x[6] * high.z + x[7] * high.w;
    for (int offset = lanes / 2; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane == 0 && key < p.to.keys && row < p.keys.count() * p.keys.tile)
      p.to.data[(of_head + block) * p.to.keys + key] = sum;
  }
}

// Adds the product of the mean of a block of a (batch, head) and that of k to those of its queries.
__global__ void __launch_bounds__(kThreads)
    add_means_kernel(const __grid_constant__ MultiplyParams p, int tokens, float* mean_logit) {
  __shared__ float of_warp[kThreads / 32];
  const int blocks = p.q_blocks.count(), batch_head = static_cast<int>(blockIdx.x) / blocks;
  const int batch = batch_head / p.heads, kv_head = batch_head % p.heads / (p.heads / p.kv_heads);
  const TokenBlock block = block_of(p.q_blocks, static_cast<int>(blockIdx.x) % blocks);
  const float* const of_q = p.means + int64_t{blockIdx.x} * p.dim;
  const float* const of_k = mean_of(p.k_mean, p.keys.cu_seqlens, batch, block.sequence, p.kv_heads, kv_head, p.dim);
  float sum = 0.f;
  for (int c = threadIdx.x; c < p.dim; c += kThreads) sum = fmaf(of_q[c], of_k[c], sum);
  for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.f;
  for (const float part : of_warp) sum += part;
  const int i = static_cast<int>(threadIdx.x);
  if (i < block.tokens) mean_logit[int64_t{batch_head} * tokens + block.first + i] += sum;
}

}  // namespace

SmoothedQueries::SmoothedQueries(const Problem& p, const Strided& k, const KeyTiles& keys, int dim,
                                 WorkspaceAllocator& workspace)
    : p_(p), k_(k), q_blocks_(query_blocks(keys, kSmoothedQueries)), keys_(keys), dim_(dim), seen_(p, workspace) {
  q_ = contiguous(p.q, OCTET_F32, workspace);
  const int64_t blocks = p.batch * p.heads * q_blocks_.count();
  means_ = workspace.take<float>(static_cast<std::size_t>(blocks * dim));
  logits_ = {.blocks = q_blocks_.count(), .keys = keys.count() * keys.tile};
  logits_.data = workspace.take<float>(static_cast<std::size_t>(blocks * logits_.keys));
}

void SmoothedQueries::centre(cudaStream_t stream) const {
  seen_.preprocess(stream);
  const auto grid = static_cast<unsigned>(logits_.blocks * p_.batch * p_.heads);
  if (!grid) return;
  const CentreParams a{strided(p_.q), strided(q_), q_blocks_, keys_, seen_.flags(), dim_, means_};
  centre_kernel<<<grid, kThreads, 0, stream>>>(a);
  check(cudaGetLastError(), "centre_kernel");
}

void SmoothedQueries::multiply(const float* k_mean, float* mean_logit, cudaStream_t stream) const {
  const auto heads = static_cast<unsigned>(p_.batch * p_.heads);
  if (!logits_.blocks || !heads || !keys_.count()) return;
  const MultiplyParams a{.k = k_,
                         .q_blocks = q_blocks_,
                         .keys = keys_,
                         .heads = static_cast<int>(p_.heads),
                         .kv_heads = static_cast<int>(p_.kv_heads),
                         .dim = dim_,
                         .means = means_,
                         .k_mean = k_mean,
                         .to = logits_};
  const int rows_at_once = kMultiplyThreads * kVec8 / dim_;
  const int runs = (logits_.keys + rows_at_once - 1) / rows_at_once;
  multiply_kernel<<<runs * heads, kMultiplyThreads, 0, stream>>>(a, runs);
  check(cudaGetLastError(), "multiply_kernel");
  if (!mean_logit) return;
  add_means_kernel<<<logits_.blocks * heads, kThreads, 0, stream>>>(a, static_cast<int>(p_.tokens_q), mean_logit);
  check(cudaGetLastError(), "add_means_kernel");
}

}  // namespace octet::cuda
