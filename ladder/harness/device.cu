// What the harness runs on the GPU around a rung: conversions, RoPE and the projections of a whole layer. All of it is
// simple rather than fast, and none of it is part of the time that a program prints for its rung.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "harness.h"

namespace ladder {
namespace {

__device__ float load(float x) { return x; }
__device__ float load(__half x) { return __half2float(x); }
__device__ float load(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ void store(float& to, float x) { to = x; }
__device__ void store(__half& to, float x) { to = __float2half_rn(x); }
__device__ void store(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }

constexpr int kThreads = 256;

__device__ int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
unsigned blocks_for(int64_t count) { return static_cast<unsigned>(ceil_div(count, kThreads)); }

template <typename From, typename To>
__global__ void convert(const From* from, To* to, int64_t count) {
  const int64_t i = thread_index();
  if (i < count) store(to[i], load(from[i]));
}

// Each thread rotates one pair of channels.
template <typename T>
__global__ void rope_kernel(T* x, int64_t pairs, int seq, int dim, const Rotation* rotations, bool halves) {
  const int64_t i = thread_index();
  if (i >= pairs) return;
  const int pair = i % (dim / 2);
  const int64_t row = i / (dim / 2);
  const Rotation r = rotations[row % seq * (dim / 2) + pair];
  T* first = x + row * dim + (halves ? pair : 2 * pair);
  T* second = first + (halves ? dim / 2 : 1);
  const float a = load(*first), b = load(*second);
  store(*first, a * r.cosine - b * r.sine);
  store(*second, a * r.sine + b * r.cosine);
}

// A matrix whose rows are positions and whose columns are [heads, dim], stored as [batch, heads, seq, dim].
struct Heads {
  int heads, seq, dim;
  __device__ int64_t operator()(int64_t row, int column) const {
    return ((row / seq * heads + column / dim) * seq + row % seq) * dim + column % dim;
  }
};

// A matrix stored row by row.
struct Rows {
  int width;
  __device__ int64_t operator()(int64_t row, int column) const { return row * width + column; }
};

// c [m, n] = a [m, k] times b [k, n], with f32 sums; where the elements of a and c lie is given.
template <typename T, typename A, typename C>
__global__ void multiply(const T* a, A a_at, const T* b, T* c, C c_at, int64_t m, int k, int n) {
  constexpr int kTile = 16;
  __shared__ float a_tile[kTile][kTile], b_tile[kTile][kTile];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTile + threadIdx.y;
  const int column = blockIdx.y * kTile + threadIdx.x;
  float sum = 0;
  for (int x0 = 0; x0 < k; x0 += kTile) {
    const int x = x0 + threadIdx.x, y = x0 + threadIdx.y;
    a_tile[threadIdx.y][threadIdx.x] = row < m && x < k ? load(a[a_at(row, x)]) : 0;
    b_tile[threadIdx.y][threadIdx.x] = y < k && column < n ? load(b[static_cast<int64_t>(y) * n + column]) : 0;
    __syncthreads();
    for (int i = 0; i < kTile; ++i) sum += a_tile[threadIdx.y][i] * b_tile[i][threadIdx.x];
    __syncthreads();
  }
  if (row < m && column < n) store(c[c_at(row, column)], sum);
}

// Calls f with a null pointer to the element type.
template <typename F>
void with_type(Element element, F f) {
  if (element == Element::f32) return f(static_cast<float*>(nullptr));
  if (element == Element::f16) return f(static_cast<__half*>(nullptr));
  f(static_cast<__nv_bfloat16*>(nullptr));
}

template <typename A, typename C>
void launch_multiply(Element element, const void* a, A a_at, const void* b, void* c, C c_at, int64_t m, int k, int n,
                     cudaStream_t stream) {
  with_type(element, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const dim3 grid(static_cast<unsigned>(ceil_div(m, 16)), static_cast<unsigned>(ceil_div(n, 16)));
    launch("projection", multiply<T, A, C>, grid, dim3(16, 16), 0, stream, static_cast<const T*>(a), a_at,
           static_cast<const T*>(b), static_cast<T*>(c), c_at, m, k, n);
  });
}

}  // namespace

void to_element(Element element, const float* from, void* to, int64_t count, cudaStream_t stream) {
  with_type(element, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    launch("to_element", convert<float, T>, blocks_for(count), kThreads, 0, stream, from, static_cast<T*>(to), count);
  });
}

void to_float(Element element, const void* from, float* to, int64_t count, cudaStream_t stream) {
  with_type(element, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    launch("to_float", convert<T, float>, blocks_for(count), kThreads, 0, stream, static_cast<const T*>(from), to,
           count);
  });
}

void rope(Element element, void* x, int64_t heads, int seq, int dim, const Rotation* rotations, Pairing pairing,
          cudaStream_t stream) {
  with_type(element, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int64_t pairs = heads * seq * (dim / 2);
    launch("rope", rope_kernel<T>, blocks_for(pairs), kThreads, 0, stream, static_cast<T*>(x), pairs, seq, dim,
           rotations, pairing == Pairing::halves);
  });
}

void project_in(Element element, const Problem& p, int d_model, const void* x, const void* w, void* q,
                cudaStream_t stream) {
  launch_multiply(element, x, Rows{d_model}, w, q, Heads{p.heads, p.seq, p.dim}, static_cast<int64_t>(p.batch) * p.seq,
                  d_model, p.heads * p.dim, stream);
}

void project_out(Element element, const Problem& p, int d_model, const void* o, const void* w, void* y,
                 cudaStream_t stream) {
  launch_multiply(element, o, Heads{p.heads, p.seq, p.dim}, w, y, Rows{d_model}, static_cast<int64_t>(p.batch) * p.seq,
                  p.heads * p.dim, d_model, stream);
}

}  // namespace ladder
