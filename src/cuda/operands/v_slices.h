// V in f16, for kernels that round it themselves while they compute: what they share with the preprocessing.
#pragma once
#include <cuda_runtime_api.h>

#include <cmath>

#include "cuda/fragment/strided.h"
#include "cuda/operands/token_flags.h"
#include "cuda/operands/v_range.h"
#include "cuda/ptx/types.h"

namespace octet::cuda {

// The mean that is subtracted from all tokens of a (batch, head): for each channel an estimate from an even sample
// (mean_limit.h), or 0 where its magnitude is less than a quarter of the largest number that counts. Its numbers are
// bf16. A bf16 token minus this mean is exact in f16, except for numbers below an eighth of the largest, which are
// rounded.
struct VMean {
  float* data;  // [batch, head, columns]; null: nothing is subtracted
  int columns;  // at least the head dim; further columns are 0
};

// Slices of v that warps convert one by one: some tokens of a head each, in the order of the heads. Warps claim slices
// by a counter and wait for nothing until a slice is converted, so whoever waits for a head does so for a bounded time,
// even if some thread blocks do not run yet.
struct VSlices {
  unsigned heads;         // of all batch elements together; 0: v was converted before the kernel
  unsigned of_head;       // slices
  unsigned slice_tokens;  // tokens of a slice
  // v in bf16, in rows of whole words; strides in elements.
  const Bf16* from;
  int64_t batch_stride, head_stride;
  unsigned token_stride, kv_heads, tokens, dim;
  F16* to;          // [batch, head, token, dim]: (from - v_mean) / scale; tokens that are not seen count as 0
  TokenFlags seen;  // by a mask tensor; without data all are
  // From a sample of each head (mean_limit.h); `by` is 1 / scale.
  VMean v_mean;              // without data where v is not centred
  const float *limits, *by;  // [batch, head]
  float* scale;              // [batch, head], a power of two
  unsigned* done;            // [batch, head]: slices that are converted, and kRepeat
  unsigned* claimed;
  // A number of the head does not fit: who converts the last slice repeats the head with another factor.
  static constexpr unsigned kRepeat = 1u << 31;
};

// Returns the exponent of the factor that brings a head into a range of f16. `most` is its largest magnitude; typical
// ones are a sixteenth of the limit.
__device__ inline int v_exponent(float most, float limit, VRange range = {}) {
  constexpr float kLeast = 0x1p-7f;
  const bool typical = limit > 0.f && limit < INFINITY, below_top = most < ldexpf(1.f, range.top);
  if (most == 0.f || (most >= 0x1p-2f && below_top && !(typical && limit < kLeast))) return 0;
  const int target = range.top - range.margin;
  int exponent = target - ilogbf(most);
  if (typical) exponent = max(exponent, range.typical + 4 - ilogbf(limit));
  // Normal float32 numbers stay normal in f16, and the inverse factor finite.
  return min(max(exponent, target - 127), 112);
}

}  // namespace octet::cuda
