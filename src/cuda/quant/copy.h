// The preparing kernels: what a mainloop cannot read as it lies is copied once into memory that it can.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/attn/views.h"

namespace octet::cuda {

// to = from, converted: round to nearest even. `through` rounds on the way (f32 into f16 by way of bf16).
// `exponent`: of each (batch, head) of `from`, numbers are multiplied by 2^exponent; or null.
void copy(const Strided& from, const Strided& to, Element through, const int* exponent, cudaStream_t stream);

// exponent[batch, head]: 2^exponent brings the largest finite magnitude into [2^13, 2^14); 0 where there is none.
// scale[batch, head] = 2^-exponent, what products with the scaled numbers must be multiplied by.
// `largest`: [batch, head] numbers of scratch.
void choose_exponents(const Strided& x, unsigned* largest, int* exponent, float* scale, cudaStream_t stream);

}  // namespace octet::cuda
