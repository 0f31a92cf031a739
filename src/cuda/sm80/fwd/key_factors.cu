#include "cuda/host/launch.h"
#include "cuda/host/status.h"
#include "cuda/sm80/fwd/key_factors.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    key_factors_kernel(const float2* scales, int64_t pairs, KeyPairFactors* factors) {
  // Leaves a scale 22 of its 24 bits, and NaN as it is.
  const auto shortened = [](float scale) { return __int_as_float(__float_as_int(scale) & ~3); };
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < pairs; i += int64_t{gridDim.x} * kThreads) {
    const float x = shortened(scales[i].x), y = shortened(scales[i].y);
    factors[i] = {{x, y}, {-kSumsBegin * x, -kSumsBegin * y}};
  }
}

}  // namespace

void compute_key_factors(const float* scales, int64_t count, KeyPairFactors* factors, cudaStream_t stream) {
  if (!count) return;
  key_factors_kernel<<<blocks_for(count / 2, kThreads), kThreads, 0, stream>>>(reinterpret_cast<const float2*>(scales),
                                                                               count / 2, factors);
  check(cudaGetLastError(), "key_factors_kernel");
}

}  // namespace octet::cuda::sm80
