// The backward kernels, by their template parameters.
#pragma once
#include "cuda/sm80/bwd/backward.h"

namespace octet::cuda::sm80 {

struct BackwardKernel {
  void (*function)(KernelParams);
  void (*sweep)(KernelParams);  // before it, by blocks of queries; null: none
  int queries, keys;            // of a tile
  int query_parts, key_parts;   // thread blocks for each block of queries, and of keys, of preprocessing
  int threads, shared_bytes;
};

template <class T, BackwardKind kind>
BackwardKernel backward_kernel(int dim);

}  // namespace octet::cuda::sm80
