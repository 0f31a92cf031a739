// The kernel of a backward pass, chosen from its recipe.
#pragma once
#include <string>
#include <vector>

#include "cuda/bwd/choose.h"
#include "cuda/sm80/bwd/dmask_kernels.h"
#include "cuda/sm80/bwd/kernels.h"

namespace octet::cuda::sm80 {

struct BackwardKernels : BackwardChoice {
  bool f32;               // the kernels of f32.h; else `kernel`
  BackwardKernel kernel;  // with the bytes of its tile of the mask tensor
  bool has_classes;       // of tiles of the mask tensor
  bool stages_mask;       // its tiles have room in shared memory
  DmaskKernel dmask;      // where the gradient of the mask tensor is wanted
};
BackwardKernels choose_kernels(const Problem& p);

// Names the tiles of the kernels that it chooses from, the default first.
std::vector<std::string> backward_tiles(const Problem& p);

}  // namespace octet::cuda::sm80
