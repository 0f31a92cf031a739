// The kernel of a jvp pass on Hopper, chosen from its recipe.
#pragma once
#include "core/problem.h"
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

// Returns the kernel for a call's head dims, which do not exceed the largest that there are kernels for.
template <class T>
Kernel jvp_kernel(int64_t dim, int64_t dim_v);

struct JvpChoice {
  octet_dtype type;  // of operands
  Kernel kernel;
};
JvpChoice choose_jvp(const Problem& p);

}  // namespace octet::cuda::sm90
