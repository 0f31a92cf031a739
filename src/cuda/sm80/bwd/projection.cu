#include "cuda/bwd/exponents.h"
#include "cuda/host/launch.h"
#include "cuda/sm80/bwd/projection.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kThreads = 256;

__device__ int scale_exponent(const Exponents& e) { return e.do_ + e.v + e.product; }

template <int kQueries>
__global__ void __launch_bounds__(kThreads)
    add_lambda_kernel(const __grid_constant__ BackwardParams a, const float* lambda) {
  const int64_t tiles = a.q_tiles(), kv_heads = int64_t{a.batch} * a.kv_heads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < tiles * kQueries;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t tile = i / kQueries, kv = tile / a.q_blocks.count / (a.heads / a.kv_heads);
    const int row = static_cast<int>(i % kQueries);
    for (int part = 0; part < a.exponents[kv].parts; ++part) {
      if (rows_at<kQueries>(a.rows, part, tiles, tile).lse[row] == INFINITY) continue;  // of another part
      const int exponent = scale_exponent(a.exponents[kv]) - scale_exponent(a.exponents[part * kv_heads + kv]);
      rows_at<kQueries>(a.rows, 0, tiles, tile).delta[row] += lambda[i] * power_of_two(exponent);
    }
  }
}

}  // namespace

void add_lambda_to_delta(const BackwardParams& a, const float* lambda, cudaStream_t stream) {
  const int rows = a.q_blocks.rows;
  const auto kernel = rows == 64 ? add_lambda_kernel<64> : add_lambda_kernel<128>;
  const int64_t all = int64_t{a.batch} * a.heads * a.q_blocks.count * rows;
  kernel<<<blocks_for(all, kThreads), kThreads, 0, stream>>>(a, lambda);
  check(cudaGetLastError(), "add_lambda_kernel");
}

}  // namespace octet::cuda::sm80
