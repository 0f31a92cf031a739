// Logits that are more than scale q.k: softcap tanh(scale q.k / softcap) - slope |i + (m - n) - j| + mask, without the
// row bias of their row. The row bias is the largest number that mask and ALiBi add to any logit of the row, or 0 if
// that is not finite: a large number common to a row would take the bits of the logits. It changes nothing but lse.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.h"
#include "cuda/fragment/mask.h"
#include "cuda/host/workspace.h"
#include "cuda/operands/mask_tensor.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/types.h"
#include "cuda/sm80/kinds.h"

namespace octet::cuda::sm80 {

struct LogitTerms {
  float scale;
  float softcap, inverse_softcap;  // 0: none
  // [sequence, head]; null: none
  const float* slopes;
  int64_t slope_stride[2];
  // As in MaskTensor, whose members they are one by one: as one member ptxas orders what reads them otherwise.
  const void* mask;
  MaskElement element;
  int64_t mask_stride[4];
  int mask_bytes;
  bool mask_chunks;
  // [batch, head, query] of mask tensor and ALiBi together; null: 0, or that of ALiBi alone
  float* row_bias;
  int64_t row_bias_stride[3], row_bias_shape[3];

  // Returns the index of the first number of a row of the mask tensor.
  __device__ int64_t mask_row(int batch, int head, int query) const {
    return batch * mask_stride[0] + head * mask_stride[1] + query * mask_stride[2];
  }
  // Returns where the mask tensor has the number of a key. `key` is 0 unless numbers of a row are contiguous.
  __device__ const unsigned char* mask_at(int batch, int head, int query, int key) const {
    return static_cast<const unsigned char*>(mask) + mask_bytes * (mask_row(batch, head, query) + key);
  }
  __device__ const float* row_bias_at(int batch, int head, int query) const {
    return row_bias + batch * row_bias_stride[0] + head * row_bias_stride[1] + query * row_bias_stride[2];
  }
};

// Returns what the logits of a problem are; general ones have dropout too.
Logits logits_of(const Problem& p);
// Allocates the row biases of a problem.
LogitTerms logit_terms(const Problem& p, WorkspaceAllocator& workspace);
// Computes them, where there are any.
void compute_row_biases(const Problem& p, const LogitTerms& terms, cudaStream_t stream);

// The terms of one query.
struct RowTerms {
  float slope;         // of ALiBi; NaN where it is not finite
  float row_bias;      // what the logits lack
  int diagonal;        // the key at distance 0
  int nearest;         // without a mask tensor: the distance whose term is the row bias
  int64_t mask_start;  // its row of the mask tensor
};

// Returns the terms of query i of n, which sees `seen` of m keys. Queries from n on have those of the last one.
__device__ inline RowTerms row_terms(const LogitTerms& t, int batch, int sequence, int head, int i, int n, int m,
                                     const Interval& seen) {
  i = min(i, n - 1);
  RowTerms row{};
  if (t.slopes) {
    const float slope = t.slopes[sequence * t.slope_stride[0] + head * t.slope_stride[1]];
    row.slope = isfinite(slope) ? slope : NAN;
    row.diagonal = i + m - n;
    if (!t.mask && seen.first < seen.last) {
      const int near = min(max(row.diagonal, seen.first), seen.last - 1);
      const int least = abs(row.diagonal - near),
                most = max(abs(row.diagonal - seen.first), abs(row.diagonal - (seen.last - 1)));
      row.nearest = slope < 0.f ? most : least;
      row.row_bias = -row.slope * static_cast<float>(row.nearest);
    }
  }
  if (t.mask) row.mask_start = t.mask_row(batch, head, i);
  if (t.row_bias) row.row_bias = *t.row_bias_at(batch, head, i);
  return row;
}

// tanh and its derivative to a few units of the last place, by two instructions of the special function unit.
struct Tanh {
  float value, derivative;
};
__device__ inline Tanh tanh_of(float x) {
  constexpr float kTwoLog2e = 2.88539008f;
  const float square = x * x;
  float series = __fmaf_rn(square, 62.f / 2835, -17.f / 315);
  series = __fmaf_rn(square, series, 2.f / 15);
  series = __fmaf_rn(square, series, -1.f / 3);
  const float small = __fmaf_rn(x * square, series, x);
  // This is 1 - |tanh x|. The derivative is computed from it, because 1 - tanh^2 would lose its digits where tanh x is
  // close to 1.
  const float rest = __fdividef(2.f, ptx::exp2(fabsf(x) * kTwoLog2e) + 1.f);
  const bool near_zero = fabsf(x) < 0.3f;
  return {near_zero ? small : copysignf(1.f - rest, x),
          near_zero ? __fmaf_rn(-small, small, 1.f) : rest * (2.f - rest)};
}

// c tanh(x / c) and its derivative by x. Both are NaN where x is not finite.
struct Capped {
  float x, derivative;
};
__device__ inline Capped softcap(const LogitTerms& t, float x) {
  const Tanh tanh = tanh_of(x * t.inverse_softcap);
  const float poison = x * 0.f;
  // Below 2^-12 the cap takes less than a float has, and x / c may be too small for one.
  const bool small = fabsf(x * t.inverse_softcap) < 0x1p-12f;
  return {(small ? x : t.softcap * tanh.value) + poison, tanh.derivative + poison};
}

// Returns what ALiBi and `number` of a mask tensor add to the logit of a key.
__device__ inline float added_by_mask(const LogitTerms& t, const RowTerms& row, int key, float number) {
  if (number == -INFINITY) return number;
  const float rest = number - row.row_bias;
  return t.slopes ? __fmaf_rn(-row.slope, static_cast<float>(abs(row.diagonal - key)), rest) : rest;
}

// Returns the logit of one key from q.k.
__device__ inline float logit_of(const LogitTerms& t, const RowTerms& row, int key, float product) {
  float x = product * t.scale;
  if (t.softcap != 0.f) x = softcap(t, x).x;
  if (t.mask) {
    const float added =
        added_by_mask(t, row, key, mask_number(t.element, t.mask, row.mask_start + key * t.mask_stride[3]));
    return added == -INFINITY ? added : x + added;
  }
  if (t.slopes) x = __fmaf_rn(-row.slope, static_cast<float>(abs(row.diagonal - key) - row.nearest), x);
  return x;
}

// Turns scale s into logits by ALiBi and the mask tensor, which is read from global memory: the columns of the fragment
// are the keys from `key` on, of which there are `keys`. Those beyond the last are left as they are; mask_rows sets
// them.
template <int Columns>
__device__ void add_terms(Accumulator<Columns>& s, float scale, const LogitTerms& t,
                          const RowTerms (&rows)[kRowsPerThread], int key, int keys) {
  key += fragment_column();
  s.scale(scale);
  if (t.mask) {
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i) {
      const int at = key + i / 4 * 8 + i % 2;
      if (at >= keys) continue;
      const RowTerms& row = rows[i / 2 % 2];
      const float added =
          added_by_mask(t, row, at, mask_number(t.element, t.mask, row.mask_start + at * t.mask_stride[3]));
      s.x[i] = added == -INFINITY ? added : s.x[i] + added;
    }
  } else if (t.slopes) {
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i) {
      const RowTerms& row = rows[i / 2 % 2];
      const int distance = abs(row.diagonal - (key + i / 4 * 8 + i % 2));
      s.x[i] = __fmaf_rn(-row.slope, static_cast<float>(distance - row.nearest), s.x[i]);
    }
  }
}

}  // namespace octet::cuda::sm80
