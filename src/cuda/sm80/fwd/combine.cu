#include "cuda/fragment/finish.h"
#include "cuda/fragment/o_residual.h"
#include "cuda/host/launch.h"
#include "cuda/ptx/grid.h"
#include "cuda/scheduler/key_splits.h"
#include "cuda/sm80/fwd/combine.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kColumns = 4;  // columns of o of a thread at a time

__device__ void store(float* to, const float4& x) { *reinterpret_cast<float4*>(to) = x; }
template <class T>
__device__ void store(T* to, const float4& x) {
  *reinterpret_cast<uint2*>(to) = {ptx::pack<T>(x.x, x.y), ptx::pack<T>(x.z, x.w)};
}

// A row of the result, and where its splits lie. Rows are counted in 32 bits, as thread blocks are.
struct Row {
  int batch, head;
  int64_t token, first, step;  // of the splits, in rows

  __device__ Row(const CombineParams& a, unsigned row) {
    const unsigned tokens = static_cast<unsigned>(a.tokens), heads = static_cast<unsigned>(a.heads),
                   of_heads = row / tokens;
    token = row - of_heads * tokens;
    batch = static_cast<int>(of_heads / heads), head = static_cast<int>(of_heads % heads);
    step = a.heads * a.tokens;
    first = int64_t{batch} * a.splits * step + head * a.tokens + token;
  }
  // A split beyond the last has the numbers of the last, and no sum: behind branches, 8.0's shuffles are calls.
  __device__ RowStatistics statistics(const CombineParams& a, int split) const {
    RowStatistics x = a.statistics[first + min(split, a.splits - 1) * step];
    if (split >= a.splits) x.l = 0.f;
    return x;
  }
  __device__ float4 o(const CombineParams& a, int split, int column) const {
    return *reinterpret_cast<const float4*>(a.split_o + (first + min(split, a.splits - 1) * step) * a.dim_v + column);
  }
  // Returns what the weighted sum of o is multiplied by, and writes lse if `writes`.
  __device__ float finish(const CombineParams& a, float origin, float sum, float row_bias, bool writes) const {
    RowSum<> all = RowSum<>::of(origin, sum, row_bias);
    const float share = a.sinks.data ? all.add_sink(a.sinks.at(batch, head)) : 1.f;
    if (writes && a.lse.data) *a.lse.row<float>(batch, head, token) = all.lse();
    return sum == 0.f ? 0.f : share / sum;
  }
  __device__ void write(const CombineParams& a, int column, float4 o) const {
    with_output_type(a.o.element, [&](auto* type) {
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
    });
  }
};

__device__ void take_origin(float& origin, const RowStatistics& x) {
  if (x.l != 0.f) origin = fmaxf(origin, x.origin);
}
__device__ float weight_of(const RowStatistics& x, float origin) {
  return x.l == 0.f ? 0.f : x.l * ptx::exp2(x.origin - origin);
}
__device__ void add(float4& o, float weight, const float4& x) {
  o.x = fmaf(weight, x.x, o.x), o.y = fmaf(weight, x.y, o.y);
  o.z = fmaf(weight, x.z, o.z), o.w = fmaf(weight, x.w, o.w);
}
__device__ float4 times(const float4& o, float x) { return {o.x * x, o.y * x, o.z * x, o.w * x}; }

// Up to `Most` splits: a warp computes a row. The first of o are on their way before the weights are known.
constexpr int kRowsOfBlock = 4;
template <int Most, int AtOnce>
__global__ void __launch_bounds__(32 * kRowsOfBlock)
    combine_rows_kernel(const __grid_constant__ CombineParams a, unsigned rows) {
  static_assert(Most <= 32);
  __shared__ float weights[kRowsOfBlock][32];
  const unsigned warp = threadIdx.x / 32, at = blockIdx.x * kRowsOfBlock + warp;
  // Warps beyond the rows take part in the shuffles, too: behind a branch 8.0's shuffles are calls.
  const bool present = at < rows;
  const Row row(a, present ? at : rows - 1);
  const int lane = static_cast<int>(threadIdx.x) % 32, first_column = lane * kColumns;
  ptx::griddepcontrol_wait();
  float4 of_split[AtOnce];
  const auto ask = [&](int split, int column) {
#pragma unroll
    for (int i = 0; i < AtOnce; ++i)
      if (split + i < a.splits) of_split[i] = row.o(a, split + i, column);
  };
  ask(0, min(first_column, a.dim_v - kColumns));
  const RowStatistics own = row.statistics(a, lane % Most);  // every `Most` lanes have all of them
  float origin = -INFINITY;
  take_origin(origin, own);
#pragma unroll
  for (int lanes = Most / 2; lanes; lanes /= 2) origin = fmaxf(origin, __shfl_xor_sync(~0u, origin, lanes));
  const float weight = weight_of(own, origin);
  float sum = weight;
#pragma unroll
  for (int lanes = Most / 2; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  const float scale = row.finish(a, origin, sum, __shfl_sync(~0u, own.row_bias, 0), present && lane == 0);
  weights[warp][lane] = weight;
  __syncwarp();
  if (!present) return;
  for (int column = first_column; column < a.dim_v; column += 32 * kColumns) {
    float4 o{};
    for (int split = 0; split < a.splits; split += AtOnce) {
      if (split > 0 || column > first_column) ask(split, column);
#pragma unroll
      for (int i = 0; i < AtOnce; ++i)
        if (split + i < a.splits) add(o, weights[warp][split + i], of_split[i]);
    }
    row.write(a, column, times(o, scale));
  }
}

// Else a thread block computes a row. Groups of threads have all columns, and each sums every so many-th split. The
// first of o are on their way before the weights are known.
constexpr int kThreads = 256, kAtOnce = 8;
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ CombineParams a) {
  __shared__ float weights[kMaxKeySplits], scale;
  __shared__ float4 sums[kThreads];
  const Row row(a, blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int chunks = a.dim_v / kColumns, groups = kThreads / chunks, group = thread / chunks,
            column = thread % chunks * kColumns;
  ptx::griddepcontrol_wait();

  float4 first[kAtOnce];
#pragma unroll
  for (int n = 0; n < kAtOnce; ++n)
    if (n * groups < a.splits) first[n] = row.o(a, group + n * groups, column);
  if (thread < 32) {
    constexpr int kOfLane = kMaxKeySplits / 32;
    RowStatistics of_lane[kOfLane];
#pragma unroll
    for (int n = 0; n < kOfLane; ++n) of_lane[n] = row.statistics(a, thread + 32 * n);
    float origin = -INFINITY, sum = 0.f;
#pragma unroll
    for (const RowStatistics& x : of_lane) take_origin(origin, x);
    for (int lanes = 16; lanes; lanes /= 2) origin = fmaxf(origin, __shfl_xor_sync(~0u, origin, lanes));
#pragma unroll
    for (int n = 0; n < kOfLane; ++n) {
      const float weight = weight_of(of_lane[n], origin);
      weights[thread + 32 * n] = weight, sum += weight;
    }
    for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    const float of_sum = row.finish(a, origin, sum, __shfl_sync(~0u, of_lane[0].row_bias, 0), thread == 0);
    if (thread == 0) scale = of_sum;
  }
  __syncthreads();

  float4 o{};
#pragma unroll
  for (int n = 0; n < kAtOnce; ++n)
    if (const int i = group + n * groups; i < a.splits) add(o, weights[i], first[n]);
#pragma unroll 4
  for (int i = group + kAtOnce * groups; i < a.splits; i += groups) add(o, weights[i], row.o(a, i, column));
  sums[thread] = o;
  __syncthreads();
  if (thread >= chunks) return;
  for (int other = 1; other < groups; ++other) add(o, 1.f, sums[thread + other * chunks]);
  row.write(a, column, times(o, scale));
}

}  // namespace

void combine(const CombineParams& a, cudaStream_t stream) {
  // With more rows a warp for each was faster than a thread block on an H200 (docs/kernels/few_queries.md).
  constexpr unsigned kManyRows = 512;
  const auto rows = static_cast<unsigned>(a.batch * a.heads * a.tokens);
  const auto by_rows = [&](auto* kernel) {
    launch_general_pdl(kernel, dim3((rows + kRowsOfBlock - 1) / kRowsOfBlock), 32 * kRowsOfBlock, 0, stream, a, rows);
  };
  if (a.splits <= 8)
    by_rows(combine_rows_kernel<8, 8>);
  else if (rows > kManyRows ? a.splits <= 32 : a.splits <= 16 && a.dim_v <= 128)
    by_rows(combine_rows_kernel<32, 16>);
  else
    launch_general_pdl(combine_kernel, dim3(rows), kThreads, 0, stream, a);
}

}  // namespace octet::cuda::sm80
