// The passes of sm80. Each returns the size of its workspace; with a null workspace it does nothing else. Each has a
// function that returns the reason why it cannot solve a problem of its pass, or nothing if it can.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <optional>
#include <string>

#include "core/problem.h"

namespace octet::cuda::sm80 {

std::optional<std::string> forward_unsupported_reason(const Problem& p);
std::size_t forward(const Problem& p, void* workspace, cudaStream_t stream);
std::string forward_name(const Problem& p);

std::optional<std::string> backward_unsupported_reason(const Problem& p);
std::size_t backward(const Problem& p, void* workspace, cudaStream_t stream);
std::string backward_name(const Problem& p);

std::size_t jvp(const Problem& p, void* workspace, cudaStream_t stream);
std::string jvp_name(const Problem& p);

}  // namespace octet::cuda::sm80
