// The passes of this generation. Without a workspace (null data), only its size is counted; returns that size.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <optional>
#include <string>

#include "core/problem.h"

namespace octet::cuda::sm90 {

// bf16, f16 and int8_f16, whose weights have 16 bits.
std::size_t forward(const Problem& p, void* workspace, cudaStream_t stream);
std::string forward_name(const Problem& p);

// int8, int8_fp8, fp8 and fp8_raw.
std::size_t byte_forward(const Problem& p, void* workspace, cudaStream_t stream);
std::string byte_forward_name(const Problem& p);
constexpr int kMaxByteDim = 128;

// What forward passes with operands of 8 bits refuse.
std::optional<std::string> coded_forward_objection(const Problem& p);

std::size_t backward(const Problem& p, void* workspace, cudaStream_t stream);
std::string backward_name(const Problem& p);

}  // namespace octet::cuda::sm90
