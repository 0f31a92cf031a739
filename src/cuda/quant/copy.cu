#include "cuda/quant/copy.h"

#include <algorithm>
#include <type_traits>

#include "cuda/host/status.h"
#include "cuda/quant/elements.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;
// Line `i` of a tensor.
__device__ Line line_at(const Strided& t, int64_t i) {
  Line line;
  const int64_t lines = t.shape[3] / kVector;
  line.channel = i % lines * kVector, i /= lines;
  line.token = i % t.shape[2], i /= t.shape[2];
  line.head = i % t.shape[1], line.batch = i / t.shape[1];
  return line;
}

__global__ void __launch_bounds__(kThreads)
    copy_kernel(const Strided from, const Strided to, Element through, const int* exponent, int64_t lines) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < lines; i += int64_t{kThreads} * gridDim.x) {
    const Line line = line_at(from, i);
    Vector x;
    read(from, line, x);
    visit(through, [&](auto* type) {
      for (float& element : x) element = float(static_cast<std::remove_pointer_t<decltype(type)>>(element));
    });
    if (exponent) {
      const int by = exponent[line.batch * from.shape[1] + line.head];
      for (float& element : x) element = ldexpf(element, by);
    }
    write(to, line, x);
  }
}

// Magnitudes order as their bits do.
__global__ void __launch_bounds__(kThreads) largest_kernel(const Strided x, unsigned* largest, int64_t lines) {
  const int64_t head = blockIdx.x;
  unsigned most = 0;
  for (int64_t i = blockIdx.y * int64_t{kThreads} + threadIdx.x; i < lines; i += int64_t{kThreads} * gridDim.y) {
    Vector v;
    read(x, line_at(x, head * lines + i), v);
    for (const float element : v)
      if (isfinite(element)) most = max(most, __float_as_uint(fabsf(element)));
  }
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0) atomicMax(&largest[head], most);
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

unsigned blocks_for(int64_t items) {
  constexpr int64_t kMost = 132 * 16;  // enough to fill any GPU of this generation
  return static_cast<unsigned>(std::clamp<int64_t>((items + kThreads - 1) / kThreads, 1, kMost));
}

}  // namespace

void copy(const Strided& from, const Strided& to, Element through, const int* exponent, cudaStream_t stream) {
  const int64_t lines = from.shape[0] * from.shape[1] * from.shape[2] * from.shape[3] / kVector;
  if (!lines) return;
  copy_kernel<<<blocks_for(lines), kThreads, 0, stream>>>(from, to, through, exponent, lines);
  check(cudaGetLastError(), "copy");
}

void choose_exponents(const Strided& x, unsigned* largest, int* exponent, float* scale, cudaStream_t stream) {
  const int64_t heads = x.shape[0] * x.shape[1], lines = x.shape[2] * x.shape[3] / kVector;
  if (!heads) return;
  check(cudaMemsetAsync(largest, 0, heads * sizeof(unsigned), stream), "cudaMemsetAsync");
  if (lines) {
    const dim3 grid(static_cast<unsigned>(heads), blocks_for((lines + 3) / 4));
    largest_kernel<<<grid, kThreads, 0, stream>>>(x, largest, lines);
  }
  exponent_kernel<<<static_cast<unsigned>(heads + kThreads - 1) / kThreads, kThreads, 0, stream>>>(
      largest, exponent, scale, static_cast<int>(heads));
  check(cudaGetLastError(), "choose_exponents");
}

}  // namespace octet::cuda
