#include "cuda/host/launch.h"
#include "cuda/host/status.h"
#include "cuda/sm80/key_factors.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    key_factors_kernel(const ScalesOfKeys scales, int64_t pairs, KeyPairFactors* factors) {
  // Leaves a scale 22 of its 24 bits, and NaN as it is.
  const auto shortened = [&](float scale) {
    if (isnan(scale) && scales.nonfinite == NonFiniteKeys::zero) return 0.f;
    return __int_as_float(__float_as_int(scale) & ~3);
  };
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < pairs; i += int64_t{gridDim.x} * kThreads) {
    // Of each 64 keys, group c has the pairs with number c modulo 4.
    const float* const of_pair = scales.data + (scales.groups ? i / 32 * 4 + i % 4 : 2 * i);
    const float x = shortened(of_pair[0]), y = shortened(of_pair[scales.groups ? 0 : 1]);
    factors[i] = {{x, y}, {-scales.sums_begin * x, -scales.sums_begin * y}};
  }
}

}  // namespace

void compute_key_factors(const ScalesOfKeys& scales, int64_t count, KeyPairFactors* factors, cudaStream_t stream) {
  if (!count) return;
  key_factors_kernel<<<blocks_for(count / 2, kThreads), kThreads, 0, stream>>>(scales, count / 2, factors);
  check(cudaGetLastError(), "key_factors_kernel");
}

}  // namespace octet::cuda::sm80
