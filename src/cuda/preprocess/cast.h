// Kernels that copy tensors which a mainloop cannot read in place into memory that it can.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/fragment/key_range.h"
#include "cuda/fragment/strided.h"

namespace octet::cuda {

// Sets to = from, converted with rounding to nearest, ties to even. Numbers are rounded to the type `through` first
// (f32 into f16 by way of bf16).
void cast(const Strided& from, const Strided& to, Element through, cudaStream_t stream);

// The mean that is subtracted from all tokens of a (batch, head): for each channel an estimate from an even sample
// (mean_limit.h), or 0 where its magnitude is less than a quarter of the largest number that counts. Its numbers are
// bf16. A bf16 token minus this mean is exact in f16, except for numbers below an eighth of the largest, which are
// rounded.
struct VMean {
  float* data;  // [batch, head, columns]; null: nothing is subtracted
  int columns;  // at least the head dim; further columns are 0
};

// Sets to = (from - v_mean) / scale[batch, head] in f16, where scale is a power of two. The scale is 1 where the
// largest finite magnitude of the head is within [2^-2, 2^15) and typical ones are above 2^-11. Most heads are like
// that, and one pass is enough for them. Else the scale brings the largest into [2^13, 2^14), or typical magnitudes to
// 2^-11 if that factor is larger: numbers that are 2^26 times as large then become infinite, instead of taking all bits
// from the others. Tokens that no query sees count as zeros. `scratch` has convert_scratch numbers. The kernel that
// follows may be launched with launch_pdl (host/launch.h).
void convert_to_f16(const Strided& from, const Strided& to, Element through, const VMean& v_mean, const SeenKeys& seen,
                    float* scratch, float* scale, cudaStream_t stream);
std::size_t convert_scratch(const Strided& from);

}  // namespace octet::cuda
