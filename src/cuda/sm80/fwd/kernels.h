// The forward kernels, by their template parameters.
#pragma once
#include <cstdint>

#include "cuda/sm80/kinds.h"

namespace octet::cuda::sm80 {

struct ForwardKernel {
  const void* function;
  int rows, keys;  // of a tile
  int rows_of_warp;
  int threads, shared_bytes;
  int blocks;      // thread blocks that a multiprocessor's registers have room for
  bool masked;     // it is one for Logits::masked
  int dim, dim_v;  // channels of q and of v that it multiplies; where v has more, it runs once for each so many
};

// The kernel for the larger one of the head dims, up to 128 with half the queries. With masked logits a tile of the
// mask follows its shared bytes.
template <class Precision, Logits logits, TileRows rows>
ForwardKernel forward_kernel_of(int64_t most_dim);

}  // namespace octet::cuda::sm80
