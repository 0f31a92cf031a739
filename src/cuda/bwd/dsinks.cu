// Postprocessing of the backward pass: the gradients of sinks.
#include "cuda/bwd/exponents.h"
#include "cuda/bwd/preprocess.h"
#include "cuda/host/launch.h"
#include "cuda/ptx/grid.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 1024;

// Each thread block has one head, of one batch element or, where sinks are shared, of all batch elements. It sums
// exp(sink - lse) (dlse - delta) over the queries, always in the same order.
template <int kQueries>
__global__ void __launch_bounds__(kThreads)
    dsinks_kernel(const __grid_constant__ PreprocessParams p, const __grid_constant__ Strided dsinks) {
  constexpr int kWarps = kThreads / 32;
  __shared__ double sums[kWarps];
  ptx::griddepcontrol_wait();
  const int heads = static_cast<int>(dsinks.shape[1]), head = blockIdx.x % heads, of_batch = blockIdx.x / heads;
  const int batches = static_cast<int>(p.q.shape[0]);
  const int end = dsinks.shape[0] == batches ? of_batch + 1 : batches;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  double sum = 0.0;
  for (int batch = of_batch; batch < end; ++batch) {
    const float sink = p.sinks.at(batch, head);
    if (sink == -INFINITY) continue;
    const Exponents& e = p.exponents[(batch * heads + head) / p.group];
    const float delta_scale = power_of_two(e.do_ + e.v + e.product);
    for (int block = warp; block < p.q_blocks.count; block += kWarps) {
      const Blocks::Sequence sequence = p.q_blocks.sequence_of(block);
      const int first = (block - sequence.first_block) * kQueries;
      const int64_t tile = (static_cast<int64_t>(batch) * heads + head) * p.q_blocks.count + block;
      const auto& rows = reinterpret_cast<const QueryRows<kQueries>*>(p.rows)[tile];
      if (sequence.index < 0) continue;
      const Interval seeing = p.mask.seeing(p.q_blocks.tokens_of(sequence.index), p.k_blocks.tokens_of(sequence.index));
      for (int row = lane; row < kQueries && first + row < sequence.tokens; row += 32) {
        const Index4 index{batch, head, static_cast<int64_t>(sequence.first) + first + row, 0};
        const float lse = static_cast<const float*>(p.lse.data)[index.offset(p.lse)];
        if (lse == -INFINITY) continue;
        // The delta of a row that sees no key is 0, and its dlse is not in `rows`.
        const bool sees = seeing.first <= first + row && first + row < seeing.last;
        const float dlse = p.dlse.data ? static_cast<const float*>(p.dlse.data)[index.offset(p.dlse)] : 0.f;
        const float left_out = p.int8.mean_delta ? p.int8.mean_delta[tile * kQueries + row] : 0.f;
        sum -= static_cast<double>(expf(sink - lse)) * (sees ? rows.delta[row] / delta_scale + left_out : -dlse);
      }
    }
  }
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < kWarps; ++i) sum += sums[i];
  static_cast<float*>(dsinks.data)[Index4{of_batch, head, 0, 0}.offset(dsinks)] = static_cast<float>(sum);
}

}  // namespace

void sum_dsinks(const PreprocessParams& p, const Strided& dsinks, cudaStream_t stream) {
  const auto kernel = p.q_blocks.rows == 64 ? dsinks_kernel<64> : dsinks_kernel<128>;
  const auto blocks = static_cast<unsigned>(dsinks.shape[0] * dsinks.shape[1]);
  launch_general_pdl(kernel, blocks, kThreads, 0, stream, p, dsinks);
}

}  // namespace octet::cuda
