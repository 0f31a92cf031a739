// The passes of sm90: their plans (core/backend.h), and what `choose` says of problems that have none.
#pragma once
#include <optional>
#include <string>

#include "core/backend.h"
#include "cuda/fwd/choose.h"
#include "cuda/sm90/head_dims.h"

namespace octet::cuda::sm90 {

constexpr const char* kName = "sm90";

Plan forward(const Problem& p, const ForwardNumerics& numerics, void* workspace);
Plan backward(const Problem& p, void* workspace);
Plan jvp(const Problem& p, void* workspace);

// Returns whether there are forward kernels for some formats.
bool has_kernels(const ForwardFormats& formats);
// Returns what the kernels of a problem have beside products and a softmax: the first of ALiBi, dropout and a mask.
Extra extra_of(const Problem& p);
// Returns the reason why there is no kernel with that, of formats that have kernels without, or nothing.
std::optional<std::string> extra_unsupported_reason(const Problem& p, const ForwardNumerics& numerics);
// Returns the reason why there is no kernel for 8-bit q and k of formats that have some, or nothing.
std::optional<std::string> quantized_unsupported_reason(const Problem& p, const ForwardFormats& formats);
// Returns the reason why there is no kernel for a backward pass in 16 bits, or nothing.
std::optional<std::string> backward_unsupported_reason(const Problem& p);
// Returns the reason why there is no kernel for a jvp pass in 16 bits, or nothing.
std::optional<std::string> jvp_unsupported_reason(const Problem& p);

}  // namespace octet::cuda::sm90
