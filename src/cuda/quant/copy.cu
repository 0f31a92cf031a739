#include "cuda/quant/copy.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/host/status.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // head dims are multiples of it

using Vector = float[kVector];

template <class T>
__device__ void read_as(const T* x, int64_t stride, Vector& to) {
  if (stride == 1 && reinterpret_cast<uintptr_t>(x) % 16 == 0) {
    union {
      uint4 words[sizeof(T) * kVector / 16];
      T elements[kVector];
    } line;
    for (int i = 0; i < int(sizeof(T)) * kVector / 16; ++i) line.words[i] = reinterpret_cast<const uint4*>(x)[i];
    for (int i = 0; i < kVector; ++i) to[i] = float(line.elements[i]);
    return;
  }
  for (int i = 0; i < kVector; ++i) to[i] = float(x[i * stride]);
}

template <class T>
__device__ void write_as(T* x, int64_t stride, const Vector& from) {
  if (stride == 1 && reinterpret_cast<uintptr_t>(x) % 16 == 0) {
    union {
      uint4 words[sizeof(T) * kVector / 16];
      T elements[kVector];
    } line;
    for (int i = 0; i < kVector; ++i) line.elements[i] = T(from[i]);
    for (int i = 0; i < int(sizeof(T)) * kVector / 16; ++i) reinterpret_cast<uint4*>(x)[i] = line.words[i];
    return;
  }
  for (int i = 0; i < kVector; ++i) x[i * stride] = T(from[i]);
}

// Calls f with a null pointer of the element's type.
template <class F>
__device__ void visit(Element element, const F& f) {
  switch (element) {
    case Element::f32:
      return f(static_cast<float*>(nullptr));
    case Element::f16:
      return f(static_cast<__half*>(nullptr));
    case Element::bf16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
  }
}

// Line `i` of a tensor: 8 channels of one token.
struct Line {
  int64_t batch, head, token, channel;
  __device__ Line(const Strided& t, int64_t i) {
    const int64_t lines = t.shape[3] / kVector;
    channel = i % lines * kVector, i /= lines;
    token = i % t.shape[2], i /= t.shape[2];
    head = i % t.shape[1], batch = i / t.shape[1];
  }
  __device__ int64_t offset(const Strided& t) const {
    return batch * t.stride[0] + head * t.stride[1] + token * t.stride[2] + channel * t.stride[3];
  }
};

__device__ void read(const Strided& t, const Line& line, Vector& x) {
  visit(t.element, [&](auto* type) {
    read_as(static_cast<decltype(type)>(t.data) + line.offset(t), t.stride[3], x);
  });
}

__global__ void __launch_bounds__(kThreads)
    copy_kernel(const Strided from, const Strided to, Element through, const int* exponent, int64_t lines) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < lines; i += int64_t{kThreads} * gridDim.x) {
    const Line line(from, i);
    Vector x;
    read(from, line, x);
    visit(through, [&](auto* type) {
      for (float& element : x) element = float(static_cast<std::remove_pointer_t<decltype(type)>>(element));
    });
    if (exponent) {
      const int by = exponent[line.batch * from.shape[1] + line.head];
      for (float& element : x) element = ldexpf(element, by);
    }
    visit(to.element, [&](auto* type) {
      write_as(static_cast<decltype(type)>(to.data) + line.offset(to), to.stride[3], x);
    });
  }
}

// Magnitudes order as their bits do.
__global__ void __launch_bounds__(kThreads) largest_kernel(const Strided x, unsigned* largest, int64_t lines) {
  const int64_t head = blockIdx.x;
  unsigned most = 0;
  for (int64_t i = blockIdx.y * int64_t{kThreads} + threadIdx.x; i < lines; i += int64_t{kThreads} * gridDim.y) {
    Vector v;
    read(x, Line(x, head * lines + i), v);
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
