#include "cuda/host/launch.h"
#include "cuda/preprocess/vec8.h"
#include "cuda/sm80/bwd/lse.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr float kLargeGauge = 16.f;

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

// One warp has a row.
__global__ void __launch_bounds__(kThreads) lse_kernel(const __grid_constant__ LseParams p) {
  const int heads = static_cast<int>(p.q.shape[1]), tokens = static_cast<int>(p.q.shape[2]), lane = threadIdx.x % 32;
  const int64_t rows = p.q.shape[0] * heads * tokens;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < rows; row += int64_t{gridDim.x} * kWarps) {
    const int token = static_cast<int>(row % tokens), head = static_cast<int>(row / tokens % heads);
    const int batch = static_cast<int>(row / tokens / heads);
    const float saved = static_cast<const float*>(p.lse.data)[Index4{batch, head, token, 0}.offset(p.lse)];
    const bool packed = p.q_blocks.cu_seqlens;
    const int sequence = packed ? p.q_blocks.sequence_at(token) : batch;
    const int q_first = packed ? p.q_blocks.cu_seqlens[sequence] : 0,
              k_first = packed ? p.k_blocks.cu_seqlens[sequence] : 0;
    const int n = packed ? p.q_blocks.tokens_of(sequence) : tokens;
    const int m = packed ? p.k_blocks.tokens_of(sequence) : static_cast<int>(p.k.shape[2]);
    const int i = token - q_first;
    const KeyRange seen = p.mask.keys_of(i, n, m);
    const RowTerms terms = row_terms(p.terms, batch, sequence, head, i, n, m, seen);
    float lse = saved - terms.gauge;
    if (fabsf(terms.gauge) >= kLargeGauge && saved != -INFINITY) {
      Sum sum{-INFINITY, 0.f};
#pragma unroll 1
      for (int key = seen.first + lane; key < seen.last; key += 32) {
        const float product = dot(p, {batch, head, token, 0}, {batch, head / p.group, int64_t{k_first} + key, 0});
        sum.add(logit_of(p.terms, terms, key, product), 1.f);
      }
      for (int offset = 16; offset; offset /= 2)
        sum.add(__shfl_xor_sync(~0u, sum.m, offset), __shfl_xor_sync(~0u, sum.l, offset));
      if (p.sinks.data) sum.add(p.sinks.at(batch, head) - terms.gauge, 1.f);
      lse = sum.m + logf(sum.l);
    }
    if (lane == 0) p.to[row] = lse;
  }
}

}  // namespace

void remove_gauges(const LseParams& p, cudaStream_t stream) {
  const int64_t rows = p.q.shape[0] * p.q.shape[1] * p.q.shape[2];
  if (!rows) return;
  lse_kernel<<<blocks_for(rows, kWarps), kThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "lse_kernel");
}

}  // namespace octet::cuda::sm80
