#include "cuda/fragment/o_residual.h"
#include "cuda/host/launch.h"
#include "cuda/operands/vec8.h"
#include "cuda/sm80/bwd/f32_rows.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// One warp has a row.
__global__ void __launch_bounds__(kThreads) delta_kernel(const __grid_constant__ DeltaParams p) {
  const int64_t heads = p.do_.shape[1], tokens = p.do_.shape[2], rows = p.do_.shape[0] * heads * tokens;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < rows; row += int64_t{gridDim.x} * kWarps) {
    Index4 at{row / tokens / heads, row / tokens % heads, row % tokens, lane * kVec8};
    double sum = 0.0;
    bool seen = false;  // o of a row that sees no key is 0, whatever its do holds
    for (; at.channel < p.do_.shape[3]; at.channel += 32 * kVec8) {
      Vec8 x, o, residual{};
      read(p.do_, at, x), read(p.o, at, o);
      if (p.residual.data) read(p.residual, at, residual);
      for (int c = 0; c < kVec8; ++c) {
        const double whole = p.residual.element == Element::i8
                                 ? with_residual(o[c], static_cast<int>(residual[c]), residual_shift(p.o.element))
                                 : double{o[c]} + double{residual[c]};
        seen |= whole != 0.0, sum += double{x[c]} * whole;
      }
    }
    if (!__any_sync(~0u, seen)) sum = 0.0;
    for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    at.channel = 0;
    if (lane == 0)
      p.delta[row] =
          static_cast<float>(sum) - (p.dlse.data ? static_cast<const float*>(p.dlse.data)[at.offset(p.dlse)] : 0.f);
  }
}

__global__ void __launch_bounds__(kThreads) copy_lse_kernel(const Strided from, float* to) {
  const int64_t tokens = from.shape[2], rows = from.shape[0] * from.shape[1] * tokens;
  for (int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x; row < rows; row += int64_t{gridDim.x} * kThreads)
    to[row] = static_cast<const float*>(
        from.data)[Index4{row / tokens / from.shape[1], row / tokens % from.shape[1], row % tokens, 0}.offset(from)];
}

// Each thread block has a head.
__global__ void __launch_bounds__(kThreads, 2)
    dsinks_kernel(const Strided lse, const float* delta, const Sinks sinks, const Strided dsinks) {
  __shared__ double sums[kThreads];
  const int heads = static_cast<int>(dsinks.shape[1]), head = static_cast<int>(blockIdx.x) % heads;
  const int of_batch = static_cast<int>(blockIdx.x) / heads, batches = static_cast<int>(lse.shape[0]);
  const int end = dsinks.shape[0] == batches ? of_batch + 1 : batches;
  double sum = 0.0;
  for (int batch = of_batch; batch < end; ++batch)
    for (int64_t token = threadIdx.x; token < lse.shape[2]; token += kThreads) {
      const float sink = sinks.at(batch, head);
      const float saved = static_cast<const float*>(lse.data)[Index4{batch, head, token, 0}.offset(lse)];
      if (sink == -INFINITY || saved == -INFINITY) continue;
      sum -= double{expf(sink - saved)} * double{delta[(int64_t{batch} * heads + head) * lse.shape[2] + token]};
    }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < kThreads; ++i) sum += sums[i];
  static_cast<float*>(dsinks.data)[Index4{of_batch, head, 0, 0}.offset(dsinks)] = static_cast<float>(sum);
}

}  // namespace

void compute_delta(const DeltaParams& p, cudaStream_t stream) {
  delta_kernel<<<blocks_for(p.do_.shape[0] * p.do_.shape[1] * p.do_.shape[2], kWarps), kThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "delta_kernel");
}

void copy_lse(const Strided& from, float* to, cudaStream_t stream) {
  copy_lse_kernel<<<blocks_for(from.shape[0] * from.shape[1] * from.shape[2], kThreads), kThreads, 0, stream>>>(from,
                                                                                                                to);
  check(cudaGetLastError(), "copy_lse_kernel");
}

void sum_f32_dsinks(const Strided& lse, const float* delta, const Sinks& sinks, const Strided& dsinks,
                    cudaStream_t stream) {
  dsinks_kernel<<<static_cast<unsigned>(dsinks.shape[0] * dsinks.shape[1]), kThreads, 0, stream>>>(lse, delta, sinks,
                                                                                                   dsinks);
  check(cudaGetLastError(), "dsinks_kernel");
}

}  // namespace octet::cuda::sm80
