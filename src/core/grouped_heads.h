// Which heads may differ, and which shapes are taken for tensors of two layouts.
#pragma once
#include "core/problem.h"

namespace octet {

// Rejects what `wanted` does not allow. The shapes and the mask of the problem have been validated.
void validate_grouped_heads(const Problem& problem, octet_grouped_heads wanted);

}  // namespace octet
