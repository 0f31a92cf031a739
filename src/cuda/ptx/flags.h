// Counters and flags in global memory, by which thread blocks of one kernel wait for each other. PTX ISA, 8.10 (memory
// consistency).
#pragma once
#include <cuda/atomic>

namespace octet::cuda::ptx {

// Adds 1 and returns the former value. A thread that reads the sum also sees what this thread has seen before.
__device__ inline unsigned count(unsigned& counter) {
  return ::cuda::atomic_ref<unsigned, ::cuda::thread_scope_device>(counter).fetch_add(1u, ::cuda::memory_order_acq_rel);
}
__device__ inline void set(unsigned& flag) {
  ::cuda::atomic_ref<unsigned, ::cuda::thread_scope_device>(flag).store(1u, ::cuda::memory_order_release);
}
__device__ inline void wait_until_set(unsigned& flag) {
  while (!::cuda::atomic_ref<unsigned, ::cuda::thread_scope_device>(flag).load(::cuda::memory_order_acquire))
    __nanosleep(100);
}

}  // namespace octet::cuda::ptx
