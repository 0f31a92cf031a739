// The jvp kernels of one type of operands.
#pragma once
#include "cuda/sm80/jvp/epilogue.h"
#include "cuda/sm80/jvp/mainloop.h"

namespace octet::cuda::sm80 {

template <class T, int Dim, Logits logits, Tangents tangents>
__global__ void __launch_bounds__(Jvp<T, Dim, logits, tangents>::kThreads, Jvp<T, Dim, logits, tangents>::Tile::kBlocks)
    jvp_by_mma_sync(const __grid_constant__ JvpParams params) {
  extern __shared__ __align__(128) unsigned char memory[];
  using Kernel = Jvp<T, Dim, logits, tangents>;
  Kernel kernel{params, *reinterpret_cast<typename Kernel::Shared*>(memory)};
  kernel.run(blockIdx.x);
}

template <class T, int Dim, Logits logits, Tangents tangents>
JvpKernel jvp_kernel_of() {
  using Kernel = Jvp<T, Dim, logits, tangents>;
  return {.function = reinterpret_cast<const void*>(jvp_by_mma_sync<T, Dim, logits, tangents>),
          .dim = Dim,
          .rows = Kernel::kRows,
          .keys = Kernel::kKeys,
          .dim_v = Kernel::kDimV,
          .threads = Kernel::kThreads,
          .shared_bytes = Kernel::kSharedBytes};
}

template <class T, Logits logits, Tangents tangents>
JvpKernel jvp_kernel(int64_t dim) {
  return dim <= 64    ? jvp_kernel_of<T, 64, logits, tangents>()
         : dim <= 128 ? jvp_kernel_of<T, 128, logits, tangents>()
                      : jvp_kernel_of<T, 256, logits, tangents>();
}

}  // namespace octet::cuda::sm80
