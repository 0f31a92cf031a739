// The passes of sm90. Each returns the size of its workspace; with a null workspace it does nothing else.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <optional>
#include <string>

#include "core/problem.h"
#include "core/recipe.h"

namespace octet::cuda::sm90 {

// The forward pass of the precisions with P of 16 bits.
PrecisionSet forward_precisions();
std::size_t forward(const Problem& p, void* workspace, cudaStream_t stream);
std::string forward_name(const Problem& p);

// The forward pass of the precisions with P of 8 bits.
PrecisionSet forward_8bit_precisions();
std::size_t forward_8bit(const Problem& p, void* workspace, cudaStream_t stream);
std::string forward_8bit_name(const Problem& p);
constexpr int kMax8BitDim = 128;

// Returns the reason why a forward pass with 8-bit q and k cannot run a problem, or nothing if it can.
std::optional<std::string> quantized_unsupported_reason(const Problem& p);

std::size_t backward(const Problem& p, void* workspace, cudaStream_t stream);
std::string backward_name(const Problem& p);

}  // namespace octet::cuda::sm90
