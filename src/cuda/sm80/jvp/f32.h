// The jvp pass in float32, without tensor cores: each number is computed as float32 arithmetic rounds it.
#pragma once
#include "core/backend.h"

namespace octet::cuda::sm80 {

Plan jvp_f32(const Problem& p, void* workspace);

}  // namespace octet::cuda::sm80
