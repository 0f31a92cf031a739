// Asynchronous copies from global to shared memory. PTX ISA, 9.7.9.25.3 (cp.async).
#pragma once
#include <cstdint>

namespace octet::cuda::ptx {

__device__ inline uint32_t shared_address(const void* x) { return static_cast<uint32_t>(__cvta_generic_to_shared(x)); }

// Writes 16 bytes to the shared address `to`: the first `bytes` of them come from `from`, the others are
// zeros.
__device__ inline void cp_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// The same with all 16 bytes.
__device__ inline void cp_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// The first of these through L1, which keeps bytes that are copied more than once.
__device__ inline void cp_async_through_l1(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// Writes 8 bytes in the same way.
__device__ inline void cp_async_8(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// Copies 4 bytes.
__device__ inline void cp_async_word(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// Writes 4 bytes: those of `from`, or zeros.
__device__ inline void cp_async_word(uint32_t to, const void* from, bool zero) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(zero ? 0 : 4) : "memory");
}
// Closes the group of all copies that this thread has issued since the last call.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the last `Groups` groups of this thread have arrived. Only this thread is sure to see their data.
template <int Groups>
__device__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Groups) : "memory");
}

}  // namespace octet::cuda::ptx
