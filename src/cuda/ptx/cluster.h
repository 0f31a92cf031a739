// Thread blocks of a cluster: places in each other's shared memory, and barriers there.
#pragma once
#include <cstdint>

namespace octet::cuda::ptx {

// %cluster_ctarank, read where it is asked for, as registers are short. PTX ISA, 10.13.
__device__ inline unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of all thread blocks of the cluster. PTX ISA, 9.7.13.4 (barrier.cluster).
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Where what this thread block has at `place` lies in the block of that rank. PTX ISA, 9.7.9.24 (mapa).
__device__ inline uint32_t at_rank(const void* place, unsigned rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(there)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(place))), "r"(rank));
  return there;
}
// Arrives at an mbarrier; releases what was done to this thread block's memory, without the wait for all others that a
// release to the cluster is. PTX ISA, 9.7.13.15.13.
__device__ inline void arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Stores a number of which the mbarrier beside it counts the bytes. PTX ISA, 9.7.9.12 (st.async).
__device__ inline void store_at(uint32_t place, uint32_t x, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(place), "r"(x),
               "r"(barrier)
               : "memory");
}
// Copies bytes, a multiple of 16, of this thread block's shared memory; the mbarrier beside the copy counts them. PTX
// ISA, 9.7.9.25.4.1 (cp.async.bulk).
__device__ inline void copy_to(uint32_t place, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(place),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from))), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace octet::cuda::ptx
