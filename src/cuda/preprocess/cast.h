// The preparing kernels: what a mainloop cannot read as it lies is copied once into memory that it can.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/fragment/key_range.h"
#include "cuda/fragment/strided.h"

namespace octet::cuda {

// to = from, converted: round to nearest even. `through` rounds on the way (f32 into f16 by way of bf16).
void copy(const Strided& from, const Strided& to, Element through, cudaStream_t stream);

// A vector for each (batch, head) that is subtracted from all tokens: in each channel their mean (mean_limit.h), by an
// even sample, or 0 where that is less than a quarter of the largest number that counts. It consists of bf16 numbers:
// those of the tokens, in bf16, less these are numbers of f16, but for those below an eighth of the largest, which are
// rounded.
struct VMean {
  float* data;  // [batch, head, columns]; null: nothing is subtracted
  int columns;  // at least the channels; the others are 0
};

// to = (from - v_mean) / scale[batch, head] in f16, a power of two. It is 1 where the head's largest finite magnitude
// is within [2^-2, 2^15) and typical ones are above 2^-11, which is most heads, so that one pass is enough for them;
// else it brings the largest into [2^13, 2^14), or typical ones to 2^-11 if that is more: then those 2^26 times larger
// become infinite, instead of taking all bits from the others. Tokens that are not seen count as zeros. `scratch`:
// convert_scratch numbers. The kernel after these may be one that waits (ptx/grid.h).
void convert_to_f16(const Strided& from, const Strided& to, Element through, const VMean& v_mean, const SeenKeys& seen,
                    float* scratch, float* scale, cudaStream_t stream);
std::size_t convert_scratch(const Strided& from);

}  // namespace octet::cuda
