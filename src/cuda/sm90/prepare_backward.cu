#include <algorithm>
#include <type_traits>

#include "cuda/host/status.h"
#include "cuda/quant/elements.h"
#include "cuda/sm90/config.h"
#include "cuda/sm90/prepare_backward.h"
#include "cuda/tile/shared.h"

namespace octet::cuda::sm90 {
namespace {

constexpr int kThreads = 256;

enum Tensor { kQ, kK, kV, kDo, kTensors };

__device__ const Strided& tensor(const Preparation& p, int which) {
  return which == kQ ? p.q : which == kK ? p.k : which == kV ? p.v : p.do_;
}

// Eight channels; `In`: the type of all inputs, whose rows are whole 16-byte words, or void for any type and strides.
template <class In>
__device__ void read_as_known(const Strided& x, const Line& at, Vector& v) {
  if constexpr (std::is_void_v<In>) {
    read(x, at, v);
  } else {
    union {
      uint4 word;
      In elements[kVector];
    } line;
    line.word = *reinterpret_cast<const uint4*>(static_cast<const In*>(x.data) + at.offset(x));
    for (int i = 0; i < kVector; ++i) v[i] = float(line.elements[i]);
  }
}

// The largest finite magnitude of each tensor of each (batch, kv head), and sums of k over chunks of its tokens.
template <class In>
__global__ void __launch_bounds__(kThreads) survey_kernel(const Preparation p, int kv_heads) {
  const int which = blockIdx.z, chunk = blockIdx.y, head = blockIdx.x;
  const Strided& x = tensor(p, which);
  const int lines = static_cast<int>(x.shape[3]) / kVector;
  const int64_t tokens = x.shape[2], first = tokens * chunk / kChunks, last = tokens * (chunk + 1) / kChunks;
  const int batch = head / kv_heads, group = which == kQ || which == kDo ? p.group : 1;
  __shared__ float partial[kThreads][kVector + 1];
  // Threads of a row of `lines`, as many rows as fit.
  const int rows = kThreads / lines, line = threadIdx.x % lines, row = threadIdx.x / lines;
  unsigned most = 0;
  Vector sum{};
  if (row < rows) {
    for (int g = 0; g < group; ++g)
#pragma unroll 4
      for (int64_t token = first + row; token < last; token += rows) {
        Vector v;
        read_as_known<In>(x, {batch, head % kv_heads * group + g, token, line * kVector}, v);
        for (int i = 0; i < kVector; ++i) {
          const bool finite = isfinite(v[i]);
          if (finite) most = max(most, __float_as_uint(fabsf(v[i])));
          sum[i] += finite ? v[i] : 0.f;
        }
      }
  }
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0) atomicMax(&p.largest[which * gridDim.x + head], most);
  if (which != kK) return;
  for (int i = 0; i < kVector; ++i) partial[threadIdx.x][i] = sum[i];
  __syncthreads();
  for (int c = threadIdx.x; c < lines * kVector; c += kThreads) {
    float total = 0.f;
    for (int r = 0; r < rows; ++r) total += partial[r * lines + c / kVector][c % kVector];
    p.sums[(static_cast<int64_t>(head) * kChunks + chunk) * x.shape[3] + c] = total;
  }
}

// One block for each (batch, kv head).
__global__ void choose_kernel(const Preparation p) {
  const int head = blockIdx.x, heads = gridDim.x;
  if (threadIdx.x == 0) {
    // The largest magnitude comes to [2^13, 2^14).
    const auto exponent = [&](int which) {
      const float most = __uint_as_float(p.largest[which * heads + head]);
      return p.scaled && most > 0.f ? min(max(13 - ilogbf(most), -100), 100) : 0;
    };
    p.exponents[head] = {exponent(kQ), exponent(kK), exponent(kV), exponent(kDo)};
  }
  const int dim = static_cast<int>(p.k.shape[3]);
  for (int c = threadIdx.x; c < dim; c += blockDim.x) {
    float total = 0.f;
    for (int chunk = 0; chunk < kChunks; ++chunk)
      total += p.sums[(static_cast<int64_t>(head) * kChunks + chunk) * dim + c];
    p.mean[head * dim + c] = p.smooth && p.k.shape[2] ? total / static_cast<float>(p.k.shape[2]) : 0.f;
  }
}

// 2^exponent, which is between -101 and 101.
__device__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

template <class T>
__device__ void put(unsigned char* tile, int rows, int row, int line, const Vector& x, float scale) {
  union {
    uint4 word;
    T elements[kVector];
  } out;
  for (int i = 0; i < kVector; ++i) out.elements[i] = T(x[i] * scale);
  const int panel = line / kSwizzleRows;
  *reinterpret_cast<uint4*>(tile + panel * rows * kPanelRowBytes + row * kPanelRowBytes +
                            (line % kSwizzleRows ^ row % kSwizzleRows) * 16) = out.word;
}

__device__ void round_through(octet_dtype type, Vector& x) {
  for (float& element : x) {
    if (type == OCTET_BF16) element = float(Bf16(element));
    if (type == OCTET_F16) element = float(F16(element));
  }
}

// One tile of one head for each block: q and do with delta and lse (blockIdx.z 0), or k and v (1). A group of threads
// takes a row.
template <class T, class In>
__global__ void __launch_bounds__(kThreads) tile_kernel(const Preparation p, int heads, int kv_heads) {
  const bool queries = blockIdx.z == 0;
  const Blocks& blocks = queries ? p.q_blocks : p.k_blocks;
  const int lines = p.tile_dim / kVector, line = threadIdx.x % lines;
  const int head_index = blockIdx.x, block = blockIdx.y;
  if (head_index >= p.q.shape[0] * (queries ? heads : kv_heads) || block >= blocks.count) return;
  const int batch = head_index / (queries ? heads : kv_heads), head = head_index % (queries ? heads : kv_heads);
  const int kv = batch * kv_heads + (queries ? head / p.group : head);
  const Blocks::Sequence sequence = blocks.sequence_of(block);
  const Exponents e = p.exponents[kv];
  const int64_t tile = static_cast<int64_t>(head_index) * blocks.count + block;
  const int64_t tile_start = tile * blocks.rows * p.tile_dim * static_cast<int64_t>(sizeof(T));
  const float q_scale = power_of_two(e.q), do_scale = power_of_two(e.do_);
  const float k_scale = power_of_two(e.k), k_smooth_scale = power_of_two(e.k - 1), v_scale = power_of_two(e.v);
  Vector mean{};
  if (!queries && line * kVector < p.k.shape[3])
    for (int c = 0; c < kVector; ++c) mean[c] = p.mean[static_cast<int64_t>(kv) * p.k.shape[3] + line * kVector + c];

#pragma unroll 2
  for (int row = threadIdx.x / lines; row < blocks.rows; row += kThreads / lines) {
    const int i = (block - sequence.first_block) * blocks.rows + row;
    const bool present = sequence.index >= 0 && i < sequence.tokens;
    const Line at{batch, head, static_cast<int64_t>(sequence.first) + i, line * kVector};
    const auto fetch = [&](const Strided& x, Vector& v) {
      for (float& element : v) element = 0.f;
      if (present && line * kVector < x.shape[3]) read_as_known<In>(x, at, v);
    };
    if (queries) {
      Vector q, do_, o, residual;
      fetch(p.q, q), fetch(p.do_, do_), fetch(p.o, o);
      if (p.o_residual.data) {
        fetch(p.o_residual, residual);
        for (int c = 0; c < kVector; ++c) o[c] += residual[c];
      }
      round_through(p.round_q, q), round_through(p.round_do, do_);
      put<T>(p.q_tiles + tile_start, blocks.rows, row, line, q, q_scale);
      put<T>(p.do_tiles + tile_start, blocks.rows, row, line, do_, do_scale);
      float delta = 0.f;
      for (int c = 0; c < kVector; ++c) delta += do_[c] * o[c];
      for (int step = lines / 2; step; step /= 2) delta += __shfl_xor_sync(~0u, delta, step);
      if (line == 0) {
        // Rows that see no key, and those beyond the sequence, get p = 0.
        const float lse = present ? static_cast<const float*>(p.lse.data)[at.offset(p.lse)] : -INFINITY;
        const bool sees = lse != -INFINITY;
        float* const of_tile = p.rows + tile * 2 * blocks.rows;
        of_tile[row] = sees ? lse * 1.44269504f - static_cast<float>(p.weight_exponent) : INFINITY;
        of_tile[blocks.rows + row] = sees ? ldexpf(delta, e.do_ + e.v + p.product_exponent) : 0.f;
      }
    } else {
      Vector k, v;
      fetch(p.k, k), fetch(p.v, v);
      round_through(p.round_k, k), round_through(p.round_v, v);
      put<T>(p.k_tiles + tile_start, blocks.rows, row, line, k, k_scale);
      put<T>(p.v_tiles + tile_start, blocks.rows, row, line, v, v_scale);
      if (present)
        for (int c = 0; c < kVector; ++c) k[c] -= mean[c];
      put<T>(p.k_smooth_tiles + tile_start, blocks.rows, row, line, k, k_smooth_scale);
    }
  }
}

// One tile of one head for each block. Element [row, 8 line + ...] of dq lies with the threads that summed it: two
// numbers with each of four.
template <int Dim>
__global__ void __launch_bounds__(kThreads) dq_kernel(const BackwardArguments a, const Strided dq) {
  constexpr int kQueries = BackwardTile<Dim>::kQueries, kLines = Dim / kVector;
  // Two warpgroups share a tile: each has 64 queries, and as many channels as make half of it.
  constexpr bool kByQueries = kQueries > kWarpgroupRows;
  constexpr int kLinesOfOne = kByQueries ? kLines : kLines / 2;
  const int head_index = blockIdx.x, block = blockIdx.y;
  const int batch = head_index / a.heads, head = head_index % a.heads;
  const Blocks::Sequence sequence = a.q_blocks.sequence_of(block);
  if (sequence.index < 0) return;
  const Exponents e = a.exponents[batch * a.kv_heads + head / (a.heads / a.kv_heads)];
  // In two steps, as the power alone may not be a float.
  const int exponent = -a.weight_exponent - a.product_exponent - e.do_ - e.v - (e.k - 1);
  const float first = ldexpf(a.scale, exponent / 2), second = ldexpf(1.f, exponent - exponent / 2);
  const float* const tile = a.dq + (static_cast<int64_t>(head_index) * a.q_blocks.count + block) * kQueries * Dim;
  const int line = threadIdx.x % kLines;
  if (line * kVector >= a.dim) return;
    // Rows r and r + 8 lie with the same threads.
#pragma unroll 2
  for (int pair = threadIdx.x / kLines; pair < kQueries / 2; pair += kThreads / kLines) {
    const int row = pair / 8 * 16 + pair % 8, r = row % kWarpgroupRows;
    const int warpgroup = kByQueries ? row / kWarpgroupRows : line / kLinesOfOne;
    const float* const from =
        tile + warpgroup * (kQueries * Dim / 2) + line % kLinesOfOne * (kWarpgroup * 4) + (r / 16 * 32 + r % 8 * 4) * 4;
    Vector x[kRowsPerThread];
    for (int j = 0; j < 4; ++j) {
      const float4 four = reinterpret_cast<const float4*>(from)[j];
      x[0][2 * j] = four.x * first * second, x[0][2 * j + 1] = four.y * first * second;
      x[1][2 * j] = four.z * first * second, x[1][2 * j + 1] = four.w * first * second;
    }
    for (int half = 0; half < kRowsPerThread; ++half) {
      const int i = (block - sequence.first_block) * kQueries + row + 8 * half;
      if (i < sequence.tokens)
        write(dq, {batch, head, static_cast<int64_t>(sequence.first) + i, line * kVector}, x[half]);
    }
  }
}

// Whether all inputs are of one 16-bit type, in rows of whole 16-byte words.
bool direct(const Preparation& p, Element element) {
  for (const Strided* x : {&p.q, &p.k, &p.v, &p.do_, &p.o, &p.o_residual}) {
    if (!x->data) continue;
    if (x->element != element || x->stride[3] != 1 || reinterpret_cast<uintptr_t>(x->data) % 16) return false;
    for (int i = 0; i < 3; ++i)
      if (x->shape[i] > 1 && x->stride[i] % kVector) return false;
  }
  return true;
}

template <class In>
void prepare_as(const Preparation& p, cudaStream_t stream) {
  const auto heads = static_cast<unsigned>(p.q.shape[1]), kv_heads = static_cast<unsigned>(p.k.shape[1]);
  const auto batch = static_cast<unsigned>(p.q.shape[0]), all = batch * kv_heads;
  survey_kernel<In><<<dim3(all, kChunks, kTensors), kThreads, 0, stream>>>(p, static_cast<int>(kv_heads));
  choose_kernel<<<all, 128, 0, stream>>>(p);
  const dim3 grid(batch * heads, static_cast<unsigned>(std::max(p.q_blocks.count, p.k_blocks.count)), 2);
  const auto kernel = p.type == OCTET_F16 ? tile_kernel<F16, In> : tile_kernel<Bf16, In>;
  kernel<<<grid, kThreads, 0, stream>>>(p, static_cast<int>(heads), static_cast<int>(kv_heads));
}

}  // namespace

void prepare(const Preparation& p, cudaStream_t stream) {
  const auto all = static_cast<std::size_t>(p.k.shape[0] * p.k.shape[1]);
  check(cudaMemsetAsync(p.largest, 0, kTensors * all * sizeof(unsigned), stream), "cudaMemsetAsync");
  if (direct(p, Element::bf16))
    prepare_as<Bf16>(p, stream);
  else if (direct(p, Element::f16))
    prepare_as<F16>(p, stream);
  else
    prepare_as<void>(p, stream);
  check(cudaGetLastError(), "prepare");
}

void gather_dq(const BackwardArguments& a, int tile_dim, const Strided& dq, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(a.batch * a.heads), static_cast<unsigned>(a.q_blocks.count));
  const auto kernel = tile_dim == 64 ? dq_kernel<64> : tile_dim == 128 ? dq_kernel<128> : dq_kernel<256>;
  kernel<<<grid, kThreads, 0, stream>>>(a, dq);
  check(cudaGetLastError(), "gather_dq");
}

}  // namespace octet::cuda::sm90
