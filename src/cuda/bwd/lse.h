// A kernel before the backward mainloop, which subtracts the row bias from lse: the largest number that a mask tensor
// and ALiBi add to a logit of the row. Mainloops have logits without it.
//
// `Logits` makes a row's terms of `Row row(batch, sequence, head, query, n, m, seen)`, with the row bias
// `row_bias(row)`, and of these and q.k the logit of a key without the row bias, `logit(row, key, product)`.
#pragma once
#include "cuda/bwd/preprocess.h"
#include "cuda/fragment/mask.h"
#include "cuda/host/launch.h"
#include "cuda/operands/vec8.h"

namespace octet::cuda {

struct LseParams {
  Strided q, k, lse;
  octet_dtype round;  // the type that q and k are rounded to first
  Sinks sinks;
  Blocks q_blocks, k_blocks;
  Mask mask;
  int group;
  float* to;  // [batch, head, token]
};

constexpr int kLseThreads = 256;
constexpr float kLargeRowBias = 16.f;

// The sum of exponentials of some logits, relative to the largest.
struct ExpSum {
  float m, l;
  __device__ void add(float other_m, float other_l) {
    const float most = fmaxf(m, other_m), from = most == -INFINITY ? 0.f : most;
    l = l * expf(m - from) + other_l * expf(other_m - from), m = most;
  }
};

template <class Logits>
struct LseRows {
  const LseParams& p;
  const Logits& logits;

  // A row of logits and its terms.
  struct Row {
    int batch, head, token, k_first;
    Interval seen;
    typename Logits::Row terms;
    float row_bias;
    float saved;  // its lse, from which the row bias was not subtracted

    __device__ bool has_lost_bits() const { return fabsf(row_bias) >= kLargeRowBias && saved != -INFINITY; }
  };
  __device__ Row row(int64_t index) const {
    const int64_t heads = p.q.shape[1], tokens = p.q.shape[2];
    Row x;
    x.token = static_cast<int>(index % tokens), x.head = static_cast<int>(index / tokens % heads);
    x.batch = static_cast<int>(index / tokens / heads);
    x.saved = static_cast<const float*>(p.lse.data)[Index4{x.batch, x.head, x.token, 0}.offset(p.lse)];
    const bool packed = p.q_blocks.cu_seqlens;
    const int sequence = packed ? p.q_blocks.sequence_at(x.token) : x.batch;
    const int q_first = packed ? p.q_blocks.cu_seqlens[sequence] : 0;
    x.k_first = packed ? p.k_blocks.cu_seqlens[sequence] : 0;
    const int n = packed ? p.q_blocks.tokens_of(sequence) : static_cast<int>(tokens);
    const int m = packed ? p.k_blocks.tokens_of(sequence) : static_cast<int>(p.k.shape[2]);
    x.seen = p.mask.keys_of(x.token - q_first, n, m);
    x.terms = logits.row(x.batch, sequence, x.head, x.token - q_first, n, m, x.seen);
    x.row_bias = Logits::row_bias(x.terms);
    return x;
  }

  static __device__ float rounded(octet_dtype type, float x) {
    return type == OCTET_BF16 ? float(Bf16(x)) : type == OCTET_F16 ? float(F16(x)) : x;
  }
  __device__ float dot(Index4 at_q, Index4 at_k) const {
    float sum = 0.f;
#pragma unroll 1
    for (; at_q.channel < p.q.shape[3]; at_q.channel += kVec8, at_k.channel += kVec8) {
      Vec8 x, y;
      read(p.q, at_q, x), read(p.k, at_k, y);
      for (int c = 0; c < kVec8; ++c) sum = fmaf(rounded(p.round, x[c]), rounded(p.round, y[c]), sum);
    }
    return sum;
  }
  // Returns lse of a row minus its row bias, computed by a warp.
  __device__ float lse_of(const Row& row) const {
    ExpSum sum{-INFINITY, 0.f};
#pragma unroll 1
    for (int key = row.seen.first + static_cast<int>(threadIdx.x) % 32; key < row.seen.last; key += 32) {
      const float product =
          dot({row.batch, row.head, row.token, 0}, {row.batch, row.head / p.group, int64_t{row.k_first} + key, 0});
      sum.add(logits.logit(row.terms, key, product), 1.f);
    }
    for (int offset = 16; offset; offset /= 2)
      sum.add(__shfl_xor_sync(~0u, sum.m, offset), __shfl_xor_sync(~0u, sum.l, offset));
    if (p.sinks.data) sum.add(p.sinks.at(row.batch, row.head) - row.row_bias, 1.f);
    return sum.m + logf(sum.l);
  }
};

// Each lane of a warp has a row; the warp computes those that have lost bits one after the other.
template <class Logits>
__global__ void __launch_bounds__(kLseThreads, 1)
    lse_kernel(const __grid_constant__ LseParams p, const __grid_constant__ Logits logits) {
  const LseRows<Logits> of{p, logits};
  const int lane = threadIdx.x % 32;
  const int64_t rows = p.q.shape[0] * p.q.shape[1] * p.q.shape[2];
  for (int64_t first = int64_t{blockIdx.x} * kLseThreads + threadIdx.x - lane; first < rows;
       first += int64_t{gridDim.x} * kLseThreads) {
    const bool present = first + lane < rows;
    bool lost_bits = false;
    if (present) {
      const auto row = of.row(first + lane);
      lost_bits = row.has_lost_bits();
      if (!lost_bits) p.to[first + lane] = row.saved - row.row_bias;
    }
    for (unsigned left = __ballot_sync(~0u, lost_bits); left;) {
      const int of_lane = 31 - __clz(static_cast<int>(left));
      left ^= 1u << of_lane;
      const float lse = of.lse_of(of.row(first + of_lane));
      if (lane == 0) p.to[first + of_lane] = lse;
    }
  }
}

// Sets `to` to lse minus the row bias. Beside a large row bias the saved lse has lost the bits of the logits: such rows
// are computed again.
template <class Logits>
void subtract_row_biases(const LseParams& p, const Logits& logits, cudaStream_t stream) {
  const int64_t rows = p.q.shape[0] * p.q.shape[1] * p.q.shape[2];
  if (!rows) return;
  lse_kernel<<<blocks_for(rows, kLseThreads), kLseThreads, 0, stream>>>(p, logits);
  check(cudaGetLastError(), "lse_kernel");
}

}  // namespace octet::cuda
