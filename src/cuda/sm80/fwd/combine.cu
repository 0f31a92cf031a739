#include "cuda/fragment/finish.h"
#include "cuda/fragment/o_residual.h"
#include "cuda/host/launch.h"
#include "cuda/ptx/grid.h"
#include "cuda/scheduler/key_splits.h"
#include "cuda/sm80/fwd/combine.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kThreads = 128, kColumns = 4;  // columns of o of a thread

__device__ void store(float* to, const float4& x) { *reinterpret_cast<float4*>(to) = x; }
template <class T>
__device__ void store(T* to, const float4& x) {
  *reinterpret_cast<uint2*>(to) = {ptx::pack<T>(x.x, x.y), ptx::pack<T>(x.z, x.w)};
}

// One thread block computes a row. Groups of threads have all columns, and each sums every so many-th split.
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ CombineParams a) {
  __shared__ float weights[kMaxKeySplits], share_over_sum;
  __shared__ float4 sums[kThreads];
  const int64_t row = blockIdx.x, token = row % a.tokens;
  const int head = static_cast<int>(row / a.tokens % a.heads), batch = static_cast<int>(row / a.tokens / a.heads);
  const auto split = [&](int i) { return ((int64_t{batch} * a.splits + i) * a.heads + head) * a.tokens + token; };
  const int thread = static_cast<int>(threadIdx.x);
  ptx::griddepcontrol_wait();

  if (thread < 32) {
    float origin = -INFINITY, sum = 0.f;
    for (int i = thread; i < a.splits; i += 32) {
      const RowStatistics x = a.statistics[split(i)];
      if (x.l != 0.f) origin = fmaxf(origin, x.origin);
    }
    for (int lanes = 16; lanes; lanes /= 2) origin = fmaxf(origin, __shfl_xor_sync(~0u, origin, lanes));
    for (int i = thread; i < a.splits; i += 32) {
      const RowStatistics x = a.statistics[split(i)];
      weights[i] = x.l == 0.f ? 0.f : x.l * ptx::exp2(x.origin - origin);
      sum += weights[i];
    }
    for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    RowSum<> all = RowSum<>::of(origin, sum, a.statistics[split(0)].row_bias);
    const float share = a.sinks.data ? all.add_sink(a.sinks.at(batch, head)) : 1.f;
    if (thread == 0) {
      share_over_sum = sum == 0.f ? 0.f : share / sum;
      if (a.lse.data) *a.lse.row<float>(batch, head, token) = all.lse();
    }
  }
  __syncthreads();

  const int chunks = a.dim_v / kColumns, groups = kThreads / chunks, column = thread % chunks * kColumns;
  float4 o{};
#pragma unroll 4
  for (int i = thread / chunks; i < a.splits; i += groups) {
    const float4 x = *reinterpret_cast<const float4*>(a.split_o + split(i) * a.dim_v + column);
    const float weight = weights[i];
    o.x = fmaf(weight, x.x, o.x), o.y = fmaf(weight, x.y, o.y);
    o.z = fmaf(weight, x.z, o.z), o.w = fmaf(weight, x.w, o.w);
  }
  sums[thread] = o;
  __syncthreads();
  if (thread >= chunks) return;
  for (int group = 1; group < groups; ++group) {
    const float4 x = sums[thread + group * chunks];
    o.x += x.x, o.y += x.y, o.z += x.z, o.w += x.w;
  }
  const float scale = share_over_sum;
  o = {o.x * scale, o.y * scale, o.z * scale, o.w * scale};
  const auto write = [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    store(a.o.row<T>(batch, head, token) + column, o);
    if (!a.o_residual.data) return;
    if constexpr (sizeof(T) == 2)
      if (a.o_residual.element == Element::i8) {
        *reinterpret_cast<uint32_t*>(a.o_residual.row<S8>(batch, head, token) + column) =
            residuals<T>(o.x, o.y, o.z, o.w);
        return;
      }
    o = {o.x - float(T(o.x)), o.y - float(T(o.y)), o.z - float(T(o.z)), o.w - float(T(o.w))};
    store(a.o_residual.row<T>(batch, head, token) + column, o);
  };
  with_output_type(a.o.element, write);
}

}  // namespace

void combine(const CombineParams& a, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(a.batch * a.heads * a.tokens);
  launch_general_pdl(combine_kernel, dim3(rows), kThreads, 0, stream, a);
}

}  // namespace octet::cuda::sm80
