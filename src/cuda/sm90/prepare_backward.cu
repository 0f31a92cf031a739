#include "cuda/sm90/prepare_backward.h"

#include <algorithm>
#include <type_traits>

#include "cuda/host/status.h"
#include "cuda/quant/elements.h"
#include "cuda/sm90/config.h"
#include "cuda/tile/shared.h"

namespace octet::cuda::sm90 {
namespace {

constexpr int kThreads = 256;

enum Tensor { kQ, kK, kV, kDo, kTensors };

__device__ const Strided& tensor(const Preparation& p, int which) {
  return which == kQ ? p.q : which == kK ? p.k : which == kV ? p.v : p.do_;
}

// The largest finite magnitude of each tensor of each (batch, kv head), and sums of k over chunks of its tokens.
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
        read(x, {batch, head % kv_heads * group + g, token, line * kVector}, v);
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
    for (int chunk = 0; chunk < kChunks; ++chunk) total += p.sums[(static_cast<int64_t>(head) * kChunks + chunk) * dim + c];
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
template <class T>
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
    const auto fetch = [&](const Strided& x, octet_dtype through, Vector& v) {
      for (float& element : v) element = 0.f;
      if (present && line * kVector < x.shape[3]) read(x, at, v), round_through(through, v);
    };
    Vector x;
    if (queries) {
      fetch(p.q, p.round_q, x);
      put<T>(p.q_tiles + tile_start, blocks.rows, row, line, x, q_scale);
      Vector o;
      fetch(p.do_, p.round_do, x);
      put<T>(p.do_tiles + tile_start, blocks.rows, row, line, x, do_scale);
      fetch(p.o, OCTET_F32, o);
      float delta = 0.f;
      for (int c = 0; c < kVector; ++c) delta += x[c] * o[c];
      if (p.o_residual.data) {
        fetch(p.o_residual, OCTET_F32, o);
        for (int c = 0; c < kVector; ++c) delta += x[c] * o[c];
      }
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
      fetch(p.k, p.round_k, x);
      put<T>(p.k_tiles + tile_start, blocks.rows, row, line, x, k_scale);
      if (present)
        for (int c = 0; c < kVector; ++c) x[c] -= mean[c];
      put<T>(p.k_smooth_tiles + tile_start, blocks.rows, row, line, x, k_smooth_scale);
      fetch(p.v, p.round_v, x);
      put<T>(p.v_tiles + tile_start, blocks.rows, row, line, x, v_scale);
    }
  }
}

// One tile of one head for each block. Element [row, 8 line + ...] of dq lies with the threads that summed it: two
// numbers with each of four.
template <int Dim>
__global__ void __launch_bounds__(kThreads) dq_kernel(const BackwardArguments a, const Strided dq) {
  constexpr int kQueries = BackwardTile<Dim>::kQueries, kLines = Dim / kVector;
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
#pragma unroll 4
  for (int row = threadIdx.x / kLines; row < kQueries; row += kThreads / kLines) {
    const int i = (block - sequence.first_block) * kQueries + row;
    if (i >= sequence.tokens) return;
    const int warpgroup = kQueries == kWarpgroupRows ? line / 8 : row / kWarpgroupRows;
    const int r = row % kWarpgroupRows, first_thread = r / 16 * 32 + r % 8 * 4, half = r / 8 % 2;
    const float* const from = tile + warpgroup * (kQueries * Dim / 2) + line % 8 * (kWarpgroup * 4);
    Vector x;
    for (int j = 0; j < 4; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(from + (first_thread + j) * 4 + 2 * half);
      x[2 * j] = pair.x * first * second;
      x[2 * j + 1] = pair.y * first * second;
    }
    write(dq, {batch, head, static_cast<int64_t>(sequence.first) + i, line * kVector}, x);
  }
}

}  // namespace

void prepare(const Preparation& p, cudaStream_t stream) {
  const auto heads = static_cast<unsigned>(p.q.shape[1]), kv_heads = static_cast<unsigned>(p.k.shape[1]);
  const auto batch = static_cast<unsigned>(p.q.shape[0]), all = batch * kv_heads;
  check(cudaMemsetAsync(p.largest, 0, kTensors * all * sizeof(unsigned), stream), "cudaMemsetAsync");
  survey_kernel<<<dim3(all, kChunks, kTensors), kThreads, 0, stream>>>(p, static_cast<int>(kv_heads));
  choose_kernel<<<all, 128, 0, stream>>>(p);
  const dim3 grid(batch * heads, static_cast<unsigned>(std::max(p.q_blocks.count, p.k_blocks.count)), 2);
  const auto kernel = p.type == OCTET_F16 ? tile_kernel<F16> : tile_kernel<Bf16>;
  kernel<<<grid, kThreads, 0, stream>>>(p, static_cast<int>(heads), static_cast<int>(kv_heads));
  check(cudaGetLastError(), "prepare");
}

void gather_dq(const BackwardArguments& a, const Strided& dq, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(a.batch * a.heads), static_cast<unsigned>(a.q_blocks.count));
  const auto kernel = a.q_blocks.rows == BackwardTile<64>::kQueries ? dq_kernel<64> : dq_kernel<128>;
  kernel<<<grid, kThreads, 0, stream>>>(a, dq);
  check(cudaGetLastError(), "gather_dq");
}

}  // namespace octet::cuda::sm90
