// The entry of the jvp kernel, which initializes the barriers and assigns the roles of the warpgroups, and the
// description of its instances.
#pragma once
#include "cuda/sm90/jvp/choose.h"
#include "cuda/sm90/jvp/mainloop.h"
#include "cuda/sm90/jvp/producer.h"

namespace octet::cuda::sm90 {

template <class T, class Dims>
__global__ void __launch_bounds__(Jvp<T, Dims>::kThreads, 1) jvp(const __grid_constant__ JvpParams arguments) {
  using Kernel = Jvp<T, Dims>;
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(shared_memory());
  Kernel kernel{arguments, shared};
  if (threadIdx.x == 0) {
    shared.q_pipe.init(Kernel::kConsumerThreads);
    shared.k_pipe.init(Kernel::kConsumerThreads);
    shared.v_pipe.init(Kernel::kConsumerThreads);
    publish_barriers();
  }
  __syncthreads();
  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    ptx::reg_dealloc<Kernel::Tile::kProducerRegisters>();
    if (threadIdx.x == 0) kernel.produce();
  } else {
    ptx::reg_alloc<Kernel::Tile::kRegisters>();
    kernel.consume(warpgroup - 1);
  }
}

template <class T>
Kernel jvp_kernel(int64_t dim, int64_t dim_v) {
  return first_holding(dim, dim_v, JvpDims{}, []<class Dims>(Dims) -> Kernel {
    return kernel_of<Jvp<T, Dims>, Dims>(reinterpret_cast<const void*>(&jvp<T, Dims>));
  });
}

}  // namespace octet::cuda::sm90
