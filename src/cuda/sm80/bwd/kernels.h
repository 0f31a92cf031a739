// The backward kernels, by their template parameters.
#pragma once
#include "cuda/sm80/bwd/backward.h"

namespace octet::cuda::sm80 {

struct BackwardKernel {
  void (*function)(KernelParams);
  int queries, keys;       // of a tile
  int tiles_of_key_block;  // thread blocks for each block of keys of preprocessing
  int threads, shared_bytes;
  int mask_rows, mask_columns;  // of the mask tensor that are in shared memory
  bool has_classes;             // of tiles of the mask tensor, if there is one

  // Returns the bytes of shared memory with those of a tile of the mask tensor, if there is one.
  int bytes_with(const MaskTensor& mask) const {
    return shared_bytes + (mask.chunks ? mask_rows * mask_row_bytes(mask_columns, mask.bytes) : 0);
  }
};

// Masked logits have kernels of head dims up to 64 in small shared memory, and up to 128 in a large one, where plain
// logits have one of those too, and one above 256.
template <class T, Logits logits, SharedMemory memory>
BackwardKernel backward_kernel(int dim);
// int8: head dims up to 128; plain and general logits in small shared memory, plain ones of 128 in
// that of Hopper too.
template <Logits logits, SharedMemory memory>
BackwardKernel int8_backward_kernel(int dim);
// Scales of blocks: head dims up to 128, plain and general logits.
template <Logits logits>
BackwardKernel block_backward_kernel(int dim);

}  // namespace octet::cuda::sm80
