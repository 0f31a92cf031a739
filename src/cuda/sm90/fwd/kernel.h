// The entry of the 16-bit forward kernel, which initializes the barriers and assigns the roles of the warpgroups, and
// the description of its instances.
#pragma once
#include "cuda/ptx/grid.h"
#include "cuda/sm90/fwd/mainloop.h"
#include "cuda/sm90/fwd/producer.h"
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

template <class Precision, class Dims>
__global__ void __launch_bounds__(Forward<Precision, Dims>::kThreads, 1)
    forward(const __grid_constant__ ForwardParams arguments) {
  using Kernel = Forward<Precision, Dims>;
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(shared_memory());
  Kernel kernel{arguments, shared};
  if (threadIdx.x == 0) {
    shared.q_pipe.init(Kernel::kConsumerThreads);
    shared.k_pipe.init(Kernel::kConsumerThreads);
    shared.v_pipe.init(Kernel::kConsumerThreads);
    shared.cleared.init(Kernel::kConsumerThreads);
    if constexpr (Kernel::kMasked) shared.mask_pipe.init(kWarpgroup);
    publish_barriers();
  }
  if constexpr (Kernel::kQuantizedQk || kCompensated<Precision>) ptx::griddepcontrol_wait();
  __syncthreads();
  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    ptx::reg_dealloc<Kernel::Tile::kProducerRegisters>();
    if (Kernel::kConvertsV && __shfl_sync(~0u, threadIdx.x / 32, 0) > 0)
      kernel.convert_v();
    else if (threadIdx.x == 0)
      kernel.produce();
  } else {
    ptx::reg_alloc<Kernel::Tile::kRegisters>();
    if (Kernel::kConvertsV && arguments.v_slices.heads) kernel.convert_first_v();
    kernel.consume(warpgroup - 1);
  }
}

template <class Precision>
Kernel forward_kernel(int64_t dim, int64_t dim_v) {
  return first_holding(dim, dim_v, ForwardDims<Precision>{}, []<class Dims>(Dims) -> Kernel {
    return kernel_of<Forward<Precision, Dims>, Dims>(reinterpret_cast<const void*>(&forward<Precision, Dims>));
  });
}

}  // namespace octet::cuda::sm90
