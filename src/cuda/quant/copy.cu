#include <algorithm>
#include <type_traits>

#include "cuda/host/status.h"
#include "cuda/quant/copy.h"
#include "cuda/quant/elements.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;
// Calls f(line) for this thread's lines of head blockIdx.x, the tokens shared among blockIdx.y.
template <class F>
__device__ void for_each_line(const Strided& t, const F& f) {
  const int lines = static_cast<int>(t.shape[3]) / kVector, rows = kThreads / lines;
  const int row = threadIdx.x / lines;
  if (row >= rows) return;
  Line line{blockIdx.x / t.shape[1], blockIdx.x % t.shape[1], 0, threadIdx.x % lines * kVector};
#pragma unroll 4
  for (int64_t token = static_cast<int64_t>(blockIdx.y) * rows + row; token < t.shape[2]; token += gridDim.y * rows) {
    line.token = token;
    f(line);
  }
}

__global__ void __launch_bounds__(kThreads)
    copy_kernel(const Strided from, const Strided to, Element through, const int* exponent) {
  const float scale = exponent ? ldexpf(1.f, exponent[blockIdx.x]) : 1.f;
  for_each_line(from, [&](const Line& line) {
    Vector x;
    read(from, line, x);
    visit(through, [&](auto* type) {
      for (float& element : x) element = float(static_cast<std::remove_pointer_t<decltype(type)>>(element)) * scale;
    });
    write(to, line, x);
  });
}

// Magnitudes order as their bits do.
__global__ void __launch_bounds__(kThreads) largest_kernel(const Strided x, unsigned* largest) {
  unsigned most = 0;
  for_each_line(x, [&](const Line& line) {
    Vector v;
    read(x, line, v);
    for (const float element : v)
      if (isfinite(element)) most = max(most, __float_as_uint(fabsf(element)));
  });
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0) atomicMax(&largest[blockIdx.x], most);
}

__global__ void exponent_kernel(const unsigned* largest, int* exponent, float* scale, int heads) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= heads) return;
  constexpr int kTarget = 13;
  const float most = __uint_as_float(largest[i]);
  const int by = most > 0.f ? min(max(kTarget - ilogbf(most), -100), 100) : 0;
  exponent[i] = by;
  scale[i] = ldexpf(1.f, -by);
}

// A row of blocks for each (batch, head).
dim3 grid_of(const Strided& x) {
  constexpr int64_t kMost = 1024, kTokensPerBlock = 64;
  return dim3(static_cast<unsigned>(x.shape[0] * x.shape[1]),
              static_cast<unsigned>(std::clamp<int64_t>(x.shape[2] / kTokensPerBlock, 1, kMost)));
}

}  // namespace

void copy(const Strided& from, const Strided& to, Element through, const int* exponent, cudaStream_t stream) {
  if (!from.shape[0] || !from.shape[1] || !from.shape[2]) return;
  copy_kernel<<<grid_of(from), kThreads, 0, stream>>>(from, to, through, exponent);
  check(cudaGetLastError(), "copy");
}

void choose_exponents(const Strided& x, unsigned* largest, int* exponent, float* scale, cudaStream_t stream) {
  const int64_t heads = x.shape[0] * x.shape[1];
  if (!heads) return;
  check(cudaMemsetAsync(largest, 0, heads * sizeof(unsigned), stream), "cudaMemsetAsync");
  largest_kernel<<<grid_of(x), kThreads, 0, stream>>>(x, largest);
  exponent_kernel<<<static_cast<unsigned>(heads + kThreads - 1) / kThreads, kThreads, 0, stream>>>(
      largest, exponent, scale, static_cast<int>(heads));
  check(cudaGetLastError(), "choose_exponents");
}

}  // namespace octet::cuda
