#include "cuda/sm90/prepare_backward.h"

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

template <class T>
__device__ void put(unsigned char* tile, int rows, int row, int line, const Vector& x, int exponent) {
  union {
    uint4 word;
    T elements[kVector];
  } out;
  for (int i = 0; i < kVector; ++i) out.elements[i] = T(ldexpf(x[i], exponent));
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

// Rows of q and do with delta and lse (blockIdx.z 0), of k and v (1): a group of threads for each row of a tile.
template <class T>
__global__ void __launch_bounds__(kThreads) tile_kernel(const Preparation p, int heads, int kv_heads) {
  const bool queries = blockIdx.z == 0;
  const Blocks& blocks = queries ? p.q_blocks : p.k_blocks;
  const int lines = p.tile_dim / kVector, line = threadIdx.x % lines;
  const int64_t all = static_cast<int64_t>(p.q.shape[0]) * (queries ? heads : kv_heads) * blocks.count * blocks.rows;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads / lines);
  const int64_t tile_bytes = static_cast<int64_t>(blocks.rows) * p.tile_dim * sizeof(T);
  // All threads of a warp make the same number of rounds.
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * (kThreads / lines); base < all; base += stride) {
    const int64_t index = base + threadIdx.x / lines;
    const bool inside = index < all;
    const int row = static_cast<int>(index % blocks.rows);
    const int64_t tile = index / blocks.rows;
    const int block = static_cast<int>(tile % blocks.count);
    const int64_t head_index = tile / blocks.count;
    const int batch = static_cast<int>(head_index / (queries ? heads : kv_heads));
    const int head = static_cast<int>(head_index % (queries ? heads : kv_heads));
    const Blocks::Sequence sequence = inside ? blocks.sequence_of(block) : Blocks::Sequence{-1, 0, 0, 0};
    const int i = (block - sequence.first_block) * blocks.rows + row;
    const bool present = sequence.index >= 0 && i < sequence.tokens;
    const Line at{batch, head, static_cast<int64_t>(sequence.first) + i, line * kVector};
    const int kv = inside ? batch * kv_heads + (queries ? head / p.group : head) : 0;
    const Exponents e = p.exponents[kv];
    const auto fetch = [&](const Strided& x, octet_dtype through, Vector& v) {
      for (float& element : v) element = 0.f;
      if (present && line * kVector < x.shape[3]) read(x, at, v), round_through(through, v);
    };
    Vector x;
    if (queries) {
      fetch(p.q, p.round_q, x);
      if (inside) put<T>(p.q_tiles + tile * tile_bytes, blocks.rows, row, line, x, e.q);
      Vector o;
      fetch(p.do_, p.round_do, x);
      if (inside) put<T>(p.do_tiles + tile * tile_bytes, blocks.rows, row, line, x, e.do_);
      fetch(p.o, OCTET_F32, o);
      float delta = 0.f;
      for (int c = 0; c < kVector; ++c) delta += x[c] * o[c];
      if (p.o_residual.data) {
        fetch(p.o_residual, OCTET_F32, o);
        for (int c = 0; c < kVector; ++c) delta += x[c] * o[c];
      }
      for (int step = lines / 2; step; step /= 2) delta += __shfl_xor_sync(~0u, delta, step);
      if (inside && line == 0) {
        // Rows that see no key, and those beyond the sequence, get p = 0.
        const float lse = present ? static_cast<const float*>(p.lse.data)[at.offset(p.lse)] : -INFINITY;
        const bool sees = lse != -INFINITY;
        p.rows[index] = {sees ? lse * 1.44269504f - static_cast<float>(p.weight_exponent) : INFINITY,
                         sees ? ldexpf(delta, e.do_ + e.v + p.product_exponent) : 0.f};
      }
    } else {
      fetch(p.k, p.round_k, x);
      if (inside) put<T>(p.k_tiles + tile * tile_bytes, blocks.rows, row, line, x, e.k);
      if (present && line * kVector < p.k.shape[3])
        for (int c = 0; c < kVector; ++c) x[c] -= p.mean[static_cast<int64_t>(kv) * p.k.shape[3] + line * kVector + c];
      if (inside) put<T>(p.k_smooth_tiles + tile * tile_bytes, blocks.rows, row, line, x, e.k - 1);
      fetch(p.v, p.round_v, x);
      if (inside) put<T>(p.v_tiles + tile * tile_bytes, blocks.rows, row, line, x, e.v);
    }
  }
}

// Element [row, 8 line + ...] of dq of a tile lies with the threads that summed it: two numbers with each of four.
template <int Dim>
__global__ void __launch_bounds__(kThreads) dq_kernel(const BackwardArguments a, const Strided dq) {
  constexpr int kQueries = BackwardTile<Dim>::kQueries, kLines = Dim / kVector;
  const int64_t all = static_cast<int64_t>(a.batch) * a.heads * a.q_blocks.count * kQueries * kLines;
  for (int64_t at = blockIdx.x * int64_t{kThreads} + threadIdx.x; at < all; at += int64_t{kThreads} * gridDim.x) {
    const int line = static_cast<int>(at % kLines);
    const int row = static_cast<int>(at / kLines % kQueries);
    const int64_t tile = at / (kLines * kQueries);
    const int block = static_cast<int>(tile % a.q_blocks.count);
    const int64_t head_index = tile / a.q_blocks.count;
    const int batch = static_cast<int>(head_index / a.heads), head = static_cast<int>(head_index % a.heads);
    const Blocks::Sequence sequence = a.q_blocks.sequence_of(block);
    const int i = (block - sequence.first_block) * kQueries + row;
    if (sequence.index < 0 || i >= sequence.tokens || line * kVector >= a.dim) continue;
    const int warpgroup = kQueries == kWarpgroupRows ? line / 8 : row / kWarpgroupRows;
    const int r = row % kWarpgroupRows, first_thread = r / 16 * 32 + r % 8 * 4, half = r / 8 % 2;
    const float* const from = a.dq + ((tile * 2 + warpgroup) * (kQueries * Dim / 2 / (kWarpgroup * 4)) + line % 8) * (kWarpgroup * 4);
    const Exponents e = a.exponents[batch * a.kv_heads + head / (a.heads / a.kv_heads)];
    const int exponent = -a.weight_exponent - a.product_exponent - e.do_ - e.v - (e.k - 1);
    Vector x;
    for (int j = 0; j < 4; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(from + (first_thread + j) * 4 + 2 * half);
      x[2 * j] = ldexpf(pair.x * a.scale, exponent);
      x[2 * j + 1] = ldexpf(pair.y * a.scale, exponent);
    }
    write(dq, {batch, head, static_cast<int64_t>(sequence.first) + i, line * kVector}, x);
  }
}

constexpr unsigned kManyBlocks = 132 * 16;

}  // namespace

void prepare(const Preparation& p, cudaStream_t stream) {
  const auto kv_heads = static_cast<unsigned>(p.k.shape[1]), all = static_cast<unsigned>(p.k.shape[0]) * kv_heads;
  check(cudaMemsetAsync(p.largest, 0, kTensors * all * sizeof(unsigned), stream), "cudaMemsetAsync");
  survey_kernel<<<dim3(all, kChunks, kTensors), kThreads, 0, stream>>>(p, static_cast<int>(kv_heads));
  choose_kernel<<<all, 128, 0, stream>>>(p);
  const dim3 grid(kManyBlocks, 1, 2);
  const auto heads = static_cast<int>(p.q.shape[1]);
  if (p.type == OCTET_F16)
    tile_kernel<F16><<<grid, kThreads, 0, stream>>>(p, heads, static_cast<int>(kv_heads));
  else
    tile_kernel<Bf16><<<grid, kThreads, 0, stream>>>(p, heads, static_cast<int>(kv_heads));
  check(cudaGetLastError(), "prepare");
}

void gather_dq(const BackwardArguments& a, const Strided& dq, cudaStream_t stream) {
  if (a.q_blocks.rows == BackwardTile<64>::kQueries)
    dq_kernel<64><<<kManyBlocks, kThreads, 0, stream>>>(a, dq);
  else
    dq_kernel<128><<<kManyBlocks, kThreads, 0, stream>>>(a, dq);
  check(cudaGetLastError(), "gather_dq");
}

}  // namespace octet::cuda::sm90
