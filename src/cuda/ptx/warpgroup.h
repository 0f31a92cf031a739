// What a warpgroup (four warps, 128 threads) does together: ordering of wgmma, registers, named barriers.
#pragma once
#include <cstdint>

namespace octet::cuda::ptx {

// wgmma.fence: registers and shared memory written before are seen by the wgmma that follow. PTX ISA, 9.7.15.7.1.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// wgmma.commit_group: closes the group of all wgmma issued since the last one.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// wgmma.wait_group: until at most `Pending` of the latest groups are under way.
template <int Pending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Keeps the compiler from moving uses of a register across this point: accumulators of a wgmma under way are written
// behind its back.
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

// The same value, which the compiler does not recognise as the one it was made from: it neither hoists nor folds what
// follows from it.
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

// stmatrix.m8n8.x4: matrix i of a warp from x[i]; lane l gives the shared address of row l mod 8 of matrix l / 8.
__device__ inline void stmatrix(uint32_t address, const uint32_t* x) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

// setmaxnreg: registers per thread of this warpgroup from here on. PTX ISA, 9.7.19.5.
template <int Registers>
__device__ inline void reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ inline void reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// bar.sync, bar.arrive on named barrier 1 to 15, which `threads` threads complete. PTX ISA, 9.7.13.1.
__device__ inline void barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// barrier.red.and: whether a condition holds in all of so many threads, whole warps, on a named barrier of their own.
// PTX ISA, 9.7.13.1.
template <int Threads>
__device__ inline bool all_of(bool condition, int barrier) {
  int all;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\nbarrier.cta.red.and.aligned.pred q, %2, %3, p;\n"
      "selp.b32 %0, 1, 0, q;\n}"
      : "=r"(all)
      : "r"(static_cast<int>(condition)), "r"(barrier), "n"(Threads)
      : "memory");
  return __any_sync(~0u, all);  // tells the compiler that the whole warp goes one way
}
__device__ inline bool all_of_warpgroup(bool condition, int barrier) { return all_of<128>(condition, barrier); }

}  // namespace octet::cuda::ptx
