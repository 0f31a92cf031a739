// The passes of this generation. Without a workspace (null data), only its size is counted; returns that size.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <optional>
#include <string>

#include "core/problem.h"
#include "core/recipe.h"

namespace octet::cuda::sm90 {

// The forward pass of precisions whose P has 16 bits.
PrecisionSet forward_precisions();
std::size_t forward(const Problem& p, void* workspace, cudaStream_t stream);
std::string forward_name(const Problem& p);

// The forward pass of precisions whose P has 8 bits.
PrecisionSet byte_forward_precisions();
std::size_t byte_forward(const Problem& p, void* workspace, cudaStream_t stream);
std::string byte_forward_name(const Problem& p);
constexpr int kMaxByteDim = 128;

// What forward passes with operands of 8 bits reject.
std::optional<std::string> coded_forward_unsupported_reason(const Problem& p);

std::size_t backward(const Problem& p, void* workspace, cudaStream_t stream);
std::string backward_name(const Problem& p);

}  // namespace octet::cuda::sm90
