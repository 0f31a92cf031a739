// The backward kernels, by their template parameters.
#pragma once
#include "cuda/sm80/bwd/backward.h"

namespace octet::cuda::sm80 {

struct BackwardKernel {
  void (*function)(KernelParams);
  int queries, keys;  // of a tile
  int key_parts;      // thread blocks for each block of keys of preprocessing
  int threads, shared_bytes;
};

template <class T, BackwardKind kind>
BackwardKernel backward_kernel(int dim);

}  // namespace octet::cuda::sm80
