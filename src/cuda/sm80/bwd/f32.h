// The backward pass in float32.
#pragma once
#include "core/backend.h"

namespace octet::cuda::sm80 {

Plan backward_f32(const Problem& p, void* workspace);

}  // namespace octet::cuda::sm80
