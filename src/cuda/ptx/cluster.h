// Thread blocks of a cluster: addresses in each other's shared memory, and barriers there.
#pragma once
#include <cstdint>

namespace octet::cuda::ptx {

// %cluster_ctarank. It is read at each use, because registers are short. PTX ISA, 10.13.
__device__ inline unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of all thread blocks of the cluster meet here. PTX ISA, 9.7.13.4 (barrier.cluster).
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Returns the address, in the shared memory of the thread block with that rank, that corresponds to `local` in this
// one. PTX ISA, 9.7.9.24 (mapa).
__device__ inline uint32_t at_rank(const void* local, unsigned rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(remote)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(local))), "r"(rank));
  return remote;
}
// Arrives at an mbarrier of any thread block of the cluster. Unlike a release at cluster scope, this waits neither for
// stores nor for loads in flight: whoever releases memory that a load reads must have its value. PTX ISA, 9.7.13.15.13.
__device__ inline void arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Stores a number; the mbarrier that lies in the same thread block as the destination counts its bytes. PTX ISA,
// 9.7.9.12 (st.async).
__device__ inline void store_at(uint32_t to, uint32_t x, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to), "r"(x),
               "r"(barrier)
               : "memory");
}
// Copies `bytes` bytes, a multiple of 16, from the shared memory of this thread block; the mbarrier in the thread block
// of the destination counts them. PTX ISA, 9.7.9.25.4.1 (cp.async.bulk).
__device__ inline void copy_to(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from))), "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace octet::cuda::ptx
