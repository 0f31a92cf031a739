#include "cuda/host/launch.h"
#include "cuda/operands/vec8.h"
#include "cuda/sm80/bwd/lse.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kThreads = 256;
constexpr float kLargeRowBias = 16.f;

__device__ float rounded(octet_dtype type, float x) {
  return type == OCTET_BF16 ? float(Bf16(x)) : type == OCTET_F16 ? float(F16(x)) : x;
}

__device__ float dot(const LseParams& p, Index4 at_q, Index4 at_k) {
  float sum = 0.f;
#pragma unroll 1
  for (; at_q.channel < p.q.shape[3]; at_q.channel += kVec8, at_k.channel += kVec8) {
    Vec8 x, y;
    read(p.q, at_q, x), read(p.k, at_k, y);
    for (int c = 0; c < kVec8; ++c) sum = fmaf(rounded(p.round, x[c]), rounded(p.round, y[c]), sum);
  }
  return sum;
}

// The sum of exponentials of some logits, relative to the largest.
struct Sum {
  float m, l;
  __device__ void add(float other_m, float other_l) {
    const float most = fmaxf(m, other_m), from = most == -INFINITY ? 0.f : most;
    l = l * expf(m - from) + other_l * expf(other_m - from), m = most;
  }
};

// A row of logits and its terms.
struct Row {
  int batch, head, token, k_first;
  Interval seen;
  RowTerms terms;
  float saved;  // its lse, from which the row bias was not subtracted

  __device__ Row(const LseParams& p, int64_t row) {
    const int64_t heads = p.q.shape[1], tokens = p.q.shape[2];
    token = static_cast<int>(row % tokens), head = static_cast<int>(row / tokens % heads);
    batch = static_cast<int>(row / tokens / heads);
    saved = static_cast<const float*>(p.lse.data)[Index4{batch, head, token, 0}.offset(p.lse)];
    const bool packed = p.q_blocks.cu_seqlens;
    const int sequence = packed ? p.q_blocks.sequence_at(token) : batch;
    const int q_first = packed ? p.q_blocks.cu_seqlens[sequence] : 0;
    k_first = packed ? p.k_blocks.cu_seqlens[sequence] : 0;
    const int n = packed ? p.q_blocks.tokens_of(sequence) : static_cast<int>(tokens);
    const int m = packed ? p.k_blocks.tokens_of(sequence) : static_cast<int>(p.k.shape[2]);
    seen = p.mask.keys_of(token - q_first, n, m);
    terms = row_terms(p.terms, batch, sequence, head, token - q_first, n, m, seen);
  }
  __device__ bool has_lost_bits() const { return fabsf(terms.row_bias) >= kLargeRowBias && saved != -INFINITY; }
};

// Returns lse of a row minus its row bias, computed by a warp.
__device__ float lse_of(const LseParams& p, const Row& row) {
  Sum sum{-INFINITY, 0.f};
#pragma unroll 1
  for (int key = row.seen.first + static_cast<int>(threadIdx.x) % 32; key < row.seen.last; key += 32) {
    const float product =
        dot(p, {row.batch, row.head, row.token, 0}, {row.batch, row.head / p.group, int64_t{row.k_first} + key, 0});
    sum.add(logit_of(p.terms, row.terms, key, product), 1.f);
  }
  for (int offset = 16; offset; offset /= 2)
    sum.add(__shfl_xor_sync(~0u, sum.m, offset), __shfl_xor_sync(~0u, sum.l, offset));
  if (p.sinks.data) sum.add(p.sinks.at(row.batch, row.head) - row.terms.row_bias, 1.f);
  return sum.m + logf(sum.l);
}

// Each lane of a warp has a row; the warp computes those that have lost bits one after the other.
__global__ void __launch_bounds__(kThreads) lse_kernel(const __grid_constant__ LseParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t rows = p.q.shape[0] * p.q.shape[1] * p.q.shape[2];
  for (int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x - lane; first < rows;
       first += int64_t{gridDim.x} * kThreads) {
    const bool present = first + lane < rows;
    bool lost_bits = false;
    if (present) {
      const Row row(p, first + lane);
      lost_bits = row.has_lost_bits();
      if (!lost_bits) p.to[first + lane] = row.saved - row.terms.row_bias;
    }
    for (unsigned left = __ballot_sync(~0u, lost_bits); left;) {
      const int of_lane = 31 - __clz(static_cast<int>(left));
      left ^= 1u << of_lane;
      const float lse = lse_of(p, Row(p, first + of_lane));
      if (lane == 0) p.to[first + of_lane] = lse;
    }
  }
}

}  // namespace

void subtract_row_biases(const LseParams& p, cudaStream_t stream) {
  const int64_t rows = p.q.shape[0] * p.q.shape[1] * p.q.shape[2];
  if (!rows) return;
  lse_kernel<<<blocks_for(rows, kThreads), kThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "lse_kernel");
}

}  // namespace octet::cuda::sm80
