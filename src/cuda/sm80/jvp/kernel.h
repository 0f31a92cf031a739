// The jvp kernels of one type of operands.
#pragma once
#include "cuda/sm80/jvp/epilogue.h"
#include "cuda/sm80/jvp/mainloop.h"

namespace octet::cuda::sm80 {

template <class T, int Dim, bool General>
__global__ void __launch_bounds__(kJvpThreads, JvpTile<Dim>::kBlocks)
    jvp_by_mma_sync(const __grid_constant__ JvpParams params) {
  extern __shared__ __align__(128) unsigned char memory[];
  using Kernel = Jvp<T, Dim, General>;
  Kernel kernel{params, *reinterpret_cast<typename Kernel::Shared*>(memory)};
  kernel.run(blockIdx.x);
}

template <class T, int Dim, bool General>
JvpKernel jvp_kernel_of() {
  using Kernel = Jvp<T, Dim, General>;
  return {.function = reinterpret_cast<const void*>(jvp_by_mma_sync<T, Dim, General>),
          .keys = Kernel::kKeys,
          .dim_v = Kernel::kDimV,
          .shared_bytes = Kernel::kSharedBytes};
}

template <class T, bool General>
JvpKernel jvp_kernel(int64_t dim) {
  return dim <= 64    ? jvp_kernel_of<T, 64, General>()
         : dim <= 128 ? jvp_kernel_of<T, 128, General>()
                      : jvp_kernel_of<T, 256, General>();
}

}  // namespace octet::cuda::sm80
