// The jvp pass in float32, without tensor cores: each number is computed as float32 arithmetic rounds it.
#pragma once
#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace octet::cuda::sm80 {

// Returns the size of the workspace; with a null workspace it does nothing else.
std::size_t jvp_f32(const Problem& p, void* workspace, cudaStream_t stream);

}  // namespace octet::cuda::sm80
