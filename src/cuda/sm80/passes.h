// The passes of sm80. Each returns the size of its workspace; with a null workspace it does nothing else.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "core/problem.h"

namespace octet::cuda::sm80 {

std::size_t forward(const Problem& p, void* workspace, cudaStream_t stream);
std::string forward_name(const Problem& p);

std::size_t backward(const Problem& p, void* workspace, cudaStream_t stream);
std::string backward_name(const Problem& p);

std::size_t jvp(const Problem& p, void* workspace, cudaStream_t stream);
std::string jvp_name(const Problem& p);

}  // namespace octet::cuda::sm80
