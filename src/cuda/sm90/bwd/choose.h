// The kernels of a backward pass on Hopper, chosen from its recipe, and which operands they read as the caller has
// them.
#pragma once
#include "cuda/bwd/choose.h"
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

struct BackwardKernels : BackwardChoice {
  Kernel kernel;
  Kernel further;    // for further bins, of f16
  bool key_tiles;    // preprocessing writes k and v as tiles; else the kernel takes the caller's
  bool query_tiles;  // preprocessing writes q and do as tiles; else the kernel reads the caller's
};
BackwardKernels choose_kernels(const Problem& p);

// True where TMA can read a tensor by the indices of its heads and batch elements.
bool reads_by_index(const View& x);

}  // namespace octet::cuda::sm90
