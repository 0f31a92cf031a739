// Programmatic dependent launch (host/launch.h): the thread blocks of the next kernel in a stream may start before all
// of this kernel's have ended. PTX ISA, 9.7.13.13 (griddepcontrol).
#pragma once

namespace octet::cuda::ptx {

// Lets the thread blocks of the next kernel start where there is room; they still wait at griddepcontrol_wait.
__device__ inline void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Waits until the previous kernel has ended and its writes can be read. Every thread block of every kernel waits, so
// all kernels before that one have ended, too.
__device__ inline void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace octet::cuda::ptx
