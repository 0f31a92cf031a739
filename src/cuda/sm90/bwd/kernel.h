// The entry of the backward kernel, which initializes the barriers and assigns the roles of the warpgroups.
#pragma once
#include "cuda/ptx/grid.h"
#include "cuda/sm90/bwd/mainloop.h"
#include "cuda/sm90/bwd/producer.h"

namespace octet::cuda::sm90 {

template <class T, int Dim, Sums sums, Bins bins, Extra extra>
__global__ void __launch_bounds__(Backward<T, Dim, sums, bins, extra>::kThreads, 1)
    backward(const __grid_constant__ BackwardRowsParams arguments) {
  using Kernel = Backward<T, Dim, sums, bins, extra>;
  // Aligned by its declaration: no room is left in shared memory to align it by hand.
  extern __shared__ __align__(kSwizzleBytes) unsigned char swizzled_memory[];
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(swizzled_memory);
  Kernel kernel{arguments, shared};
  ptx::griddepcontrol_launch_dependents();
  if constexpr (bins == Bins::further) {
    ptx::griddepcontrol_wait();
    if (*arguments.divided == 0) return;
  }
  if (threadIdx.x == 0) {
    shared.init(Kernel::kConsumerThreads + 1 + (arguments.k ? 0 : Kernel::Converter::kThreads));
    publish_barriers();
  }
  __syncthreads();
  ptx::griddepcontrol_wait();
  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    ptx::reg_dealloc<kBackwardProducerRegisters>();
    if (threadIdx.x == 0) kernel.produce();
    if (threadIdx.x >= 32) kernel.convert_keys(threadIdx.x - 32);
  } else {
    ptx::reg_alloc<kBackwardRegisters>();
    kernel.consume(warpgroup - 1);
  }
}

}  // namespace octet::cuda::sm90
