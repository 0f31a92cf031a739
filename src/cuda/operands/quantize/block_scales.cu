#include "cuda/host/status.h"
#include "cuda/operands/quantize/block_scales.h"
#include "cuda/operands/quantize/key_tiles.h"
#include "cuda/operands/vec8.h"
#include "cuda/ptx/max.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;

// A thread block has a block of a (batch, head), a group of lanes a row. Rows are read twice: for the scale of the
// block, and to be quantized.
__global__ void __launch_bounds__(kThreads) block_scales_kernel(const __grid_constant__ BlockScaledRows a, int rows) {
  __shared__ int largest;  // the bits of a number that is not negative
  const int lanes = a.dim / kVec8, lane = threadIdx.x % lanes, rows_at_once = kThreads / lanes;
  const int heads = static_cast<int>(a.from.shape[1]), blocks = a.blocks.count(),
            batch_head = static_cast<int>(blockIdx.x) / blocks, number = static_cast<int>(blockIdx.x) % blocks;
  const int batch = batch_head / heads, head = batch_head % heads, kv_head = head / (heads / a.kv_heads);
  const TokenBlock block = block_of(a.blocks, number);
  const Interval seen = seen_of(a.keys, block.sequence);
  const auto sees = [&](int i) {
    const int token = block.within + i;
    if (i >= block.tokens || (a.seen.data && !a.seen.of(batch, head)[block.first + i])) return false;
    if (!a.of_queries) return seen.first <= token && token < seen.last;
    const Interval keys =
        a.keys.mask.keys_of(token, tokens_of(a.blocks, block.sequence), tokens_of(a.keys, block.sequence));
    return keys.first < keys.last;
  };
  const int64_t channels =
      (int64_t{a.keys.cu_seqlens ? block.sequence : batch} * a.kv_heads + kv_head) * a.dim + lane * kVec8;
  // Reads this lane's channels of a row. Returns the largest magnitude of the row, or NaN, in all of its lanes.
  const auto read_row = [&](int i, Vec8& x, float& product) {
    const Index4 at{batch, head, block.first + i, lane * kVec8};
    for (float& y : x) y = 0.f;
    product = 0.f;
    float most = 0.f;
    if (sees(i) && at.channel < a.from.shape[3]) {
      read(a.from, at, x);
      for (int c = 0; c < kVec8; ++c) {
        if (a.mean) x[c] -= a.mean[channels + c];
        if (a.mean_logit) product = fmaf(x[c], a.key_mean[channels + c], product);
        most = ptx::max_or_nan(most, fabsf(x[c]));
      }
    }
    for (int offset = lanes / 2; offset; offset /= 2) {
      product += __shfl_xor_sync(~0u, product, offset);
      most = ptx::max_or_nan(most, __shfl_xor_sync(~0u, most, offset));
    }
    return most;
  };
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  Vec8 x;
  float product;
  for (int i = static_cast<int>(threadIdx.x) / lanes; i < a.blocks.tile; i += rows_at_once) {
    const float most = read_row(i, x, product);
    if (lane == 0 && most <= FLT_MAX) atomicMax(&largest, __float_as_int(most));
  }
  __syncthreads();
  const Scale scale = scale_of(__int_as_float(largest), 127.f);
  if (a.block_scale && threadIdx.x == 0) a.block_scale[blockIdx.x] = scale.scale;
  const int64_t first = int64_t{batch_head} * rows + (a.in_tiles ? number * a.blocks.tile : block.first);
  for (int i = static_cast<int>(threadIdx.x) / lanes; i < a.blocks.tile; i += rows_at_once) {
    const bool finite = read_row(i, x, product) <= FLT_MAX;
    if (!a.in_tiles && i >= block.tokens) continue;
    const float by = finite ? scale.inverse : 0.f;
    float y[kVec8];
    for (int c = 0; c < kVec8; ++c) y[c] = finite ? __fmul_rn(x[c], by) : 0.f;
    *reinterpret_cast<uint2*>(a.to + (first + i) * a.dim + lane * kVec8) = {ptx::pack<S8>(y[0], y[1], y[2], y[3]),
                                                                            ptx::pack<S8>(y[4], y[5], y[6], y[7])};
    if (lane > 0) continue;
    a.scale[first + i] = finite ? scale.scale : NAN;
    if (a.mean_logit) a.mean_logit[first + i] = product;
  }
}

}  // namespace

void quantize_blocks(const BlockScaledRows& rows, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(rows.blocks.count() * rows.from.shape[0] * rows.from.shape[1]);
  if (!grid) return;
  block_scales_kernel<<<grid, kThreads, 0, stream>>>(rows, rows.rows());
  check(cudaGetLastError(), "block_scales_kernel");
}

}  // namespace octet::cuda
