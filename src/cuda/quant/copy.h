// The preparing kernels: what a mainloop cannot read as it lies is copied once into memory that it can.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/attn/views.h"

namespace octet::cuda {

// to = from, converted: round to nearest even. `through` rounds on the way (f32 into f16 by way of bf16).
void copy(const Strided& from, const Strided& to, Element through, cudaStream_t stream);

// to = from / scale[batch, head] in f16, a power of two. It is 1 where the head's largest finite magnitude is within
// [2^-2, 2^15), which is most heads, so that one pass is enough for them; else it brings that into [2^13, 2^14).
// `largest`: [batch, head] numbers of scratch.
void convert_to_f16(const Strided& from, const Strided& to, Element through, unsigned* largest, float* scale,
                    cudaStream_t stream);

}  // namespace octet::cuda
