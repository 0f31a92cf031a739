// The passes of this generation. Without a workspace (null data), only its size is counted; returns that size.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "core/problem.h"

namespace octet::cuda::sm90 {

std::size_t forward(const Problem& p, void* workspace, cudaStream_t stream);
std::string forward_name(const Problem& p);

std::size_t backward(const Problem& p, void* workspace, cudaStream_t stream);
std::string backward_name(const Problem& p);

}  // namespace octet::cuda::sm90
