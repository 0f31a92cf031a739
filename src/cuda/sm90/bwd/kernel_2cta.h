// The entry of the 2-CTA backward kernel, which initializes the barriers and assigns the roles of the warpgroups.
#pragma once
#include "cuda/ptx/grid.h"
#include "cuda/sm90/bwd/mainloop_2cta.h"
#include "cuda/sm90/bwd/producer_2cta.h"

namespace octet::cuda::sm90 {

// Sets the number of registers per thread of this warpgroup.
template <int Registers>
__device__ void set_registers() {
  constexpr int kAtLaunch = 128;  // 65536 for 512 threads
  Registers > kAtLaunch ? ptx::reg_alloc<Registers>() : ptx::reg_dealloc<Registers>();
}

template <class T, class Dims, Sums sums, Bins bins>
__global__ void __cluster_dims__(Backward2Cta<T, Dims, sums, bins>::kBlocks)
    __launch_bounds__(Backward2Cta<T, Dims, sums, bins>::kThreads, 1)
        backward_2cta(const __grid_constant__ BackwardRowsParams arguments) {
  using Kernel = Backward2Cta<T, Dims, sums, bins>;
  using Registers = Registers2Cta<Dims::kDim>;
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(shared_memory<Kernel::kAlignsByHand>());
  Kernel kernel{arguments, shared};
  ptx::griddepcontrol_launch_dependents();
  if constexpr (bins == Bins::further) {
    ptx::griddepcontrol_wait();
    if (*arguments.divided == 0) return;
  }
  if (threadIdx.x == 0) {
    shared.init();
    publish_barriers();
  }
  ptx::cluster_sync();
  ptx::griddepcontrol_wait();
  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    ptx::reg_dealloc<Registers::kProducer>();
    if (threadIdx.x == 0) kernel.load_keys();
    if (threadIdx.x == 32) kernel.load_queries();
    if (threadIdx.x >= 64) kernel.clear_all(threadIdx.x - 64);
  } else if (warpgroup == 1) {
    set_registers<Registers::kP>();
    kernel.compute_p_ds();
  } else {
    set_registers<Registers::kGradients>();
    kernel.accumulate(warpgroup - 2);
  }
  ptx::cluster_sync();  // no thread block exits while its peer may still access its shared memory
}

}  // namespace octet::cuda::sm90
