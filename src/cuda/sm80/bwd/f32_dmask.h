// The kernel that sums dmask (dmask.h) in f32.
#pragma once
#include "cuda/sm80/bwd/dmask.h"
#include "cuda/sm80/bwd/f32_kernel.h"

namespace octet::cuda::sm80 {

// Returns the parameters for the tiles of a head dim, and allocates the sums of splits.
DmaskParams f32_dmask_params(const Problem& p, int dim, WorkspaceAllocator& workspace);
// Sums dmask, of a problem with a pair of a query and a key.
void sum_f32_dmask(int dim, const F32Params& a, const DmaskParams& d, cudaStream_t stream);

}  // namespace octet::cuda::sm80
