// The passes of sm80: their plans (core/backend.h).
#pragma once
#include "core/backend.h"
#include "cuda/fwd/choose.h"

namespace octet::cuda::sm80 {

constexpr const char* kName = "sm80";

Plan forward(const Problem& p, const ForwardNumerics& numerics, void* workspace);
Plan backward(const Problem& p, void* workspace);
Plan jvp(const Problem& p, void* workspace);

// Returns whether there are kernels of some formats: those of all passes are the same.
bool has_kernels(const ForwardFormats& formats);
// Returns the largest head dim of their forward kernels, and of those of the backward pass that are not in 8 bits.
int64_t most_head_dim(const ForwardFormats& formats);
// Returns whether the forward kernel of a problem with a KV cache reads k and v in their pages.
bool reads_pages(const Problem& p, const ForwardNumerics& numerics);

}  // namespace octet::cuda::sm80
