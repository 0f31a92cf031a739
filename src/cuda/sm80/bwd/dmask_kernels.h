// The kernels that sum dmask, by their template parameters.
#pragma once
#include "cuda/sm80/bwd/backward.h"
#include "cuda/sm80/bwd/dmask.h"

namespace octet::cuda::sm80 {

struct DmaskKernel {
  void (*function)(KernelParams, DmaskParams);
  int queries, keys;  // of a tile
  int threads, shared_bytes;
  int mask_rows, mask_columns;  // of the mask tensor that are in shared memory

  // Returns the bytes of shared memory with those of the tile of the mask tensor, if it is there.
  int bytes_with(const MaskTensor& mask) const {
    return shared_bytes + (mask.chunks ? mask_rows * mask_row_bytes(mask_columns, mask.bytes) : 0);
  }
};

// Masked and general logits. Masked ones set ds of hidden pairs to 0 only where the sum of one pair of tokens is
// written, so they are for masks that broadcast neither queries nor keys.
template <class T, Logits logits>
DmaskKernel dmask_kernel(int dim);

}  // namespace octet::cuda::sm80
