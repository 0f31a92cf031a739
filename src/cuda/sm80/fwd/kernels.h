// The forward kernels, by their template parameters.
#pragma once
#include <cstdint>

namespace octet::cuda::sm80 {

struct ForwardKernel {
  const void* function;
  int rows, keys;  // of a tile
  int rows_of_warp;
  int threads, shared_bytes;
  int blocks;      // thread blocks that a multiprocessor's registers have room for
  bool masked;     // it is one for mask tensors alone
  int dim, dim_v;  // channels of q and of v that it multiplies; where v has more, it runs once for each so many
};

// The kernel for the larger one of the head dims. `General`: logits may be more than scale q.k. `Few`: for few queries
// over many keys.
template <class Precision, bool General, bool Few>
ForwardKernel forward_kernel_of(int64_t most_dim);

// The same for mask tensors as the only term beside scale q.k, whose rows start at multiples of 16 bytes. A tile of the
// mask follows the kernel's shared bytes.
template <class Precision>
ForwardKernel masked_forward_kernel_of(int64_t most_dim);

}  // namespace octet::cuda::sm80
