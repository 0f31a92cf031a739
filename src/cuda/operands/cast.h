// Kernels that copy tensors which a mainloop cannot read in place into memory that it can.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/fragment/positional_mask.h"
#include "cuda/fragment/strided.h"
#include "cuda/operands/token_flags.h"
#include "cuda/operands/v_slices.h"

namespace octet::cuda {

// Sets to = from, converted with rounding to nearest, ties to even. Numbers are rounded to the type `through` first
// (f32 into f16 by way of bf16).
void cast(const Strided& from, const Strided& to, Element through, cudaStream_t stream);
// Sets `residual` to what a cast has lost, in bytes (core/o_residual.h) or as from - to.
void residual_of_cast(const Strided& from, const Strided& to, const Strided& residual, cudaStream_t stream);

// Sets to = (from - v_mean) / scale[batch, head] in f16, where scale is a power of two. The scale is 1 where the
// largest finite magnitude of the head is within [2^-2, 2^15) and typical ones are above 2^-11. Most heads are like
// that, and one pass is enough for them. Else the scale brings the largest into [2^13, 2^14), or typical magnitudes to
// 2^-11 if that factor is larger: numbers that are 2^26 times as large then become infinite, instead of taking all bits
// from the others. Tokens that no query sees, by their place or by `flags` of a mask tensor, count as zeros. `scratch`
// has convert_scratch numbers. The kernel that follows may be launched with launch_pdl (host/launch.h).
void convert_to_f16(const Strided& from, const Strided& to, Element through, const VMean& v_mean, const SeenKeys& seen,
                    const TokenFlags& flags, float* scratch, float* scale, cudaStream_t stream);
std::size_t convert_scratch(const Strided& from);

// The same by a kernel that converts v itself, in slices (v_slices.h). It can where these are bf16 numbers in whole
// words, all of which some query sees by their place.
bool converts_in_slices(const Strided& from, Element through, const SeenKeys& seen);
// Finds what that kernel must know, and clears its `counter`. The kernel may be launched with launch_pdl.
VSlices find_v_stats(const Strided& from, const Strided& to, const VMean& v_mean, const SeenKeys& seen,
                     const TokenFlags& flags, float* scratch, float* scale, unsigned* counter, cudaStream_t stream);

}  // namespace octet::cuda
