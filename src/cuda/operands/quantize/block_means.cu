#include "cuda/host/status.h"
#include "cuda/operands/quantize/params.h"
#include "cuda/operands/vec8.h"
#include "cuda/ptx/grid.h"

namespace octet::cuda {
namespace {

// The exponent of the power of two that a mean is divided by: its largest number comes into [2^13, 2^14).
__device__ int exponent_of(float most) { return most > 0.f ? max(ilogbf(most) - 13, -110) : 0; }

// Finds the mean of tile blockIdx.x of (batch, head) blockIdx.y. Sums have a fixed order.
template <int Dim>
__global__ void __launch_bounds__(kQuantizeThreads) block_means_kernel(const __grid_constant__ QuantizeKernelParams p) {
  constexpr int kLanes = Dim / kVec8, kRows = kQuantizeThreads / kLanes;
  __shared__ float sums[kRows][Dim];
  __shared__ int seen_by[kRows], largest;  // seen_by: the keys of a group of lanes that count
  const QuantizeParams& a = p.args;
  const int batch_head = blockIdx.y, batch = batch_head / a.kv_heads, head = batch_head % a.kv_heads;
  if (threadIdx.x == 0) largest = 0;
  const TileOfKeys tile = tile_of_keys(a.keys, static_cast<int>(blockIdx.x));
  const float limit = p.scratch.limit[static_cast<int>(StatsOf::k)][p.sequence_head(batch_head, tile.sequence)];
  const int lane = threadIdx.x % kLanes;
  Vec8 sum{};
  int seen = 0;
  Index4 at{batch, head, 0, lane * kVec8};
  for (int i = tile.first_seen() + threadIdx.x / kLanes; i < tile.tokens() && at.channel < a.k.shape[3]; i += kRows) {
    at.token = tile.first + i;
    Vec8 x;
    read(a.k, at, x);
    for (int c = 0; c < kVec8; ++c) sum[c] += fabsf(x[c]) < limit ? x[c] : 0.f;
    seen += !a.seen.counts || a.seen.keys.of(batch, head)[at.token];
  }
  if (lane == 0) seen_by[threadIdx.x / kLanes] = seen;
  for (int c = 0; c < kVec8; ++c) sums[threadIdx.x / kLanes][lane * kVec8 + c] = sum[c];
  __syncthreads();
  constexpr int kChannels = (Dim + kQuantizeThreads - 1) / kQuantizeThreads;
  seen = 0;
  for (const int of_lanes : seen_by) seen += of_lanes;
  float means[kChannels], most = 0.f;
  for (int i = 0; i < kChannels; ++i) {
    const int c = threadIdx.x + i * kQuantizeThreads;
    float all = 0.f;
    for (int r = 0; c < Dim && r < kRows; ++r) all += sums[r][c];
    means[i] = all / static_cast<float>(max(seen, 1)), most = fmaxf(most, fabsf(means[i]));
  }
  atomicMax(&largest, __float_as_int(most));
  __syncthreads();
  const int exponent = exponent_of(__int_as_float(largest));
  const int64_t number = int64_t{batch_head} * gridDim.x + blockIdx.x;
  for (int i = 0; i < kChannels; ++i) {
    const int c = threadIdx.x + i * kQuantizeThreads;
    if (c < Dim) a.block_means.mean[number * Dim + c] = F16(ldexpf(means[i], -exponent));
  }
  if (threadIdx.x == 0) a.block_means.factor[number] = ldexpf(1.f, exponent);
}

}  // namespace

void find_block_means(const QuantizeKernelParams& p, cudaStream_t stream) {
  const QuantizeParams& a = p.args;
  const dim3 grid(a.keys.count(), static_cast<unsigned>(a.k.shape[0]) * a.kv_heads);
  if (!grid.x || !grid.y) return;
  const auto kernel = a.dim == 64    ? block_means_kernel<64>
                      : a.dim == 128 ? block_means_kernel<128>
                                     : block_means_kernel<256>;
  kernel<<<grid, kQuantizeThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "block_means_kernel");
}

}  // namespace octet::cuda
