// Kernels that follow each other in a stream, launched by host/launch.h: the next one's blocks may take their places
// before the last of this one have ended. PTX ISA, 9.7.13.13 (griddepcontrol).
#pragma once

namespace octet::cuda::ptx {

// The next kernel's blocks may start where there is room; they still wait, below.
__device__ inline void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Until the kernel before has ended and what it wrote can be read. Every block of every kernel waits, so all kernels
// before that one have ended, too.
__device__ inline void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace octet::cuda::ptx
