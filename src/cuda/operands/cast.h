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

// Sets to = (from - v_mean) / scale[batch, head] in f16, where scale is a power of two that brings the finite numbers
// of the head into `range`. It is 1 for most heads, and one pass is enough for them. Tokens that no query sees, by
// their place or by `flags` of a mask tensor, count as zeros. `scratch` has convert_scratch numbers. The kernel that
// follows may be launched with launch_pdl (host/launch.h).
void convert_to_f16(const Strided& from, const Strided& to, Element through, const VMean& v_mean, const SeenKeys& seen,
                    const TokenFlags& flags, const VRange& range, float* scratch, float* scale, cudaStream_t stream);
std::size_t convert_scratch(const Strided& from);

// The same by a kernel that converts v itself, in slices (v_slices.h). It can where these are bf16 numbers in whole
// words, all of which some query sees by their place.
bool converts_in_slices(const Strided& from, Element through, const SeenKeys& seen);
// Finds what that kernel must know, and clears its `counter`. The kernel may be launched with launch_pdl.
VSlices find_v_stats(const Strided& from, const Strided& to, const VMean& v_mean, const SeenKeys& seen,
                     const TokenFlags& flags, float* scratch, float* scale, unsigned* counter, cudaStream_t stream);

}  // namespace octet::cuda
