#include "cuda/host/status.h"
#include "cuda/operands/mean_limit.h"
#include "cuda/operands/quantize/params.h"
#include "cuda/ptx/grid.h"

namespace octet::cuda {
namespace {

constexpr int kSampled = 64, kLanes = 16, kThreads = kSampled * kLanes;

// Finds the limit of sequence and head blockIdx.x: of k, or of v where blockIdx.y is 1. It also clears the counters of
// the next kernel.
__global__ void __launch_bounds__(kThreads)
    limits_kernel(const __grid_constant__ QuantizeKernelParams p, unsigned* counters) {
  __shared__ float largest[kSampled], limit;
  ptx::griddepcontrol_launch_dependents();
  const unsigned block = blockIdx.y * gridDim.x + blockIdx.x;
  for (std::size_t i = block * kThreads + threadIdx.x; i < p.scratch.zeros / sizeof(unsigned);
       i += static_cast<std::size_t>(gridDim.x * gridDim.y) * kThreads)
    counters[i] = 0;
  const QuantizeParams& a = p.args;
  const Strided& t = blockIdx.y ? a.v : a.k;
  const bool packed = p.chunks.cu_seqlens;
  const int batch_or_sequence = static_cast<int>(blockIdx.x) / a.kv_heads;
  const int sequence = packed ? batch_or_sequence : 0;
  const Interval seen = seen_of(p.chunks, sequence);
  const int tokens = seen.last - seen.first, sampled = min(tokens, kSampled);
  const int i = threadIdx.x / kLanes;
  float most = 0.f;
  if (i < sampled) {
    const auto place = [&](int sample) {
      return seen.first + static_cast<int>(static_cast<int64_t>(sample) * tokens / sampled);
    };
    int token = place(i);
    // A mask tensor may hide the token at the place of a sample. The next token that it does not hide is taken then.
    if (a.seen.counts) {
      const unsigned char* const sees = a.seen.keys.of(batch_or_sequence, static_cast<int>(blockIdx.x) % a.kv_heads);
      for (const int last = place(i + 1) - 1; token < last && !sees[token];) ++token;
    }
    Index4 index{packed ? 0 : batch_or_sequence, blockIdx.x % a.kv_heads,
                 token + (packed ? p.chunks.cu_seqlens[sequence] : 0), 0};
    for (index.channel = threadIdx.x % kLanes * kVec8; index.channel < t.shape[3]; index.channel += kLanes * kVec8) {
      Vec8 x;
      read(t, index, x);
      most = fmaxf(most, largest_finite(x));
    }
  }
  for (int offset = kLanes / 2; offset; offset /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
  if (threadIdx.x % kLanes == 0) largest[i] = most;
  const float found = mean_limit(largest, limit);
  if (threadIdx.x == 0) p.scratch.limit[blockIdx.y][blockIdx.x] = found;
}

}  // namespace

void find_limits(const QuantizeKernelParams& p, void* scratch, cudaStream_t stream) {
  const bool of_k = p.args.channels.k_mean || p.args.block_means.mean;
  const int means = p.args.channels.v_mean ? 2 : of_k ? 1 : 0;
  if (!means || !p.sequence_heads)
    return check(cudaMemsetAsync(scratch, 0, p.scratch.zeros, stream), "cudaMemsetAsync");
  limits_kernel<<<dim3(p.sequence_heads, means), kThreads, 0, stream>>>(p, static_cast<unsigned*>(scratch));
  check(cudaGetLastError(), "limits_kernel");
}

}  // namespace octet::cuda
