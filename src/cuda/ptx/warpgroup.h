// Instructions that a warpgroup (four warps, 128 threads) executes together: ordering of wgmma, register allocation,
// named barriers.
#pragma once
#include <cstdint>

namespace octet::cuda::ptx {

// wgmma.fence: the wgmma that follow see earlier writes to registers and shared memory. PTX ISA, 9.7.15.7.1.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// wgmma.commit_group: closes the group of all wgmma that were issued since the last call.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// wgmma.wait_group: waits until at most `Pending` of the latest groups are in flight.
template <int Pending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Keeps the compiler from moving uses of registers across this point: a wgmma in flight writes its accumulators without
// the compiler's knowledge.
template <class T, int N>
__device__ inline void fence_operand(T (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (sizeof(T) == 4 && T(0.5f) != T(0))
      asm volatile("" : "+f"(registers[i])::"memory");
    else
      asm volatile("" : "+r"(registers[i])::"memory");
  }
}

// Returns the same value, whose origin the compiler can no longer see: it neither hoists nor folds computations that
// depend on the result.
__device__ inline int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
template <class X>
__device__ const X* opaque(const X* x) {
  asm volatile("" : "+l"(x));
  return x;
}
__device__ inline float opaque(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

// stmatrix.m8n8.x4: a warp stores four 8 x 8 matrices, matrix i from x[i]. Lane l gives the shared address of row l mod
// 8 of matrix l / 8.
__device__ inline void stmatrix(uint32_t address, const uint32_t* x) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

// setmaxnreg: sets the number of registers per thread of this warpgroup. PTX ISA, 9.7.19.5.
template <int Registers>
__device__ inline void reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ inline void reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// bar.sync and bar.arrive on named barrier 1 to 15, which `threads` threads complete. PTX ISA, 9.7.13.1.
__device__ inline void barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// barrier.red.and: returns whether a condition holds in all of `Threads` threads (whole warps), which meet at a named
// barrier of their own. PTX ISA, 9.7.13.1.
template <int Threads>
__device__ inline bool all_of(bool condition, int barrier) {
  int all;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\nbarrier.cta.red.and.aligned.pred q, %2, %3, p;\n"
      "selp.b32 %0, 1, 0, q;\n}"
      : "=r"(all)
      : "r"(static_cast<int>(condition)), "r"(barrier), "n"(Threads)
      : "memory");
  return __any_sync(~0u, all);  // tells the compiler that the result is the same in the whole warp
}
__device__ inline bool all_of_warpgroup(bool condition, int barrier) { return all_of<128>(condition, barrier); }

}  // namespace octet::cuda::ptx
