// The entry of the 8-bit forward kernel, which initializes the barriers and assigns the roles of the warpgroups, and
// the description of its instances.
#pragma once
#include "cuda/ptx/grid.h"
#include "cuda/sm90/fwd/mainloop_8bit.h"
#include "cuda/sm90/fwd/producer_8bit.h"
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

template <class Precision, class Dims>
__global__ void __launch_bounds__(Forward8Bit<Precision, Dims>::kThreads, 1)
    forward_8bit(const __grid_constant__ Forward8BitParams arguments) {
  using Kernel = Forward8Bit<Precision, Dims>;
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(shared_memory());
  Kernel kernel{arguments, shared};
  if (threadIdx.x == 0) {
    shared.q_pipe.init(Kernel::kConsumerThreads);
    shared.kv_pipe.init(Kernel::kConsumerThreads);
    for (auto& group : shared.ping_pong)
      for (Barrier& barrier : group) barrier.init(1);
    publish_barriers();
  }
  kernel.write_ones();
  ptx::griddepcontrol_wait();
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

template <class Precision>
Kernel forward_8bit_kernel(int64_t dim, int64_t dim_v) {
  return first_holding(dim, dim_v, Forward8BitDims{}, []<class Dims>(Dims) -> Kernel {
    using Kind = Forward8Bit<Precision, Dims>;
    Kernel kernel = kernel_of<Kind, Dims>(reinterpret_cast<const void*>(&forward_8bit<Precision, Dims>));
    kernel.laid_out_keys = kLaidOutKeys<Precision, Dims>, kernel.skips = Kind::Tile::kSkips;
    return kernel;
  });
}

}  // namespace octet::cuda::sm90
