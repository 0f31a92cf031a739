// The backward pass in float32.
#pragma once
#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace octet::cuda::sm80 {

// Returns the size of the workspace; with a null workspace it does nothing else.
std::size_t backward_f32(const Problem& p, void* workspace, cudaStream_t stream);

}  // namespace octet::cuda::sm80
