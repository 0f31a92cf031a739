// Programmatic dependent launch (host/launch.h): the thread blocks of the next kernel in a stream may start before all
// of this kernel's have ended. PTX ISA, 9.7.13.13 (griddepcontrol). Code for GPUs before compute capability 9.0 has
// none of it, so that launches must not overlap there.
#pragma once

namespace octet::cuda::ptx {

// Lets the thread blocks of the next kernel start where there is room; they still wait at griddepcontrol_wait.
__device__ inline void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until the previous kernel has ended and its writes can be read. Every thread block of every kernel waits, so
// all kernels before that one have ended, too.
__device__ inline void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace octet::cuda::ptx
