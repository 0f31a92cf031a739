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
  int mask_rows, mask_columns;  // of the mask tensor that are in shared memory
  bool has_classes;             // of tiles of the mask tensor, if there is one

  // Returns the bytes of shared memory with those of a tile of the mask tensor, if there is one.
  int bytes_with(const MaskTensor& mask) const {
    return shared_bytes + (mask.chunks ? mask_rows * mask_row_bytes(mask_columns, mask.bytes) : 0);
  }
};

template <class T, BackwardKind kind>
BackwardKernel backward_kernel(int dim);

}  // namespace octet::cuda::sm80
