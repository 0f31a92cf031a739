// The positional masks and the dropout of a problem, as kernels read them.
#pragma once
#include "core/problem.h"
#include "cuda/fragment/dropout.h"
#include "cuda/fragment/positional_mask.h"

namespace octet::cuda {

// Returns the number of packed sequences, or 0 if the problem has none.
int sequences_of(const Problem& p);

Mask mask_of(const Problem& p);

// Returns the keys that positional masks leave to any query.
SeenKeys seen_keys(const Problem& p);

Dropout dropout_of(const Problem& p);

}  // namespace octet::cuda
