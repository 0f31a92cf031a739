// Barriers in shared memory that count arrivals and bytes.
#pragma once
#include <cstdint>
#include <cuda/ptx>

namespace octet::cuda {

// An mbarrier (PTX ISA, 9.7.13.15): a phase ends when `count` arrivals and all announced bytes have come.
struct Barrier {
  uint64_t word;

  __device__ void init(uint32_t count) { ::cuda::ptx::mbarrier_init(&word, count); }
  __device__ void arrive() { ::cuda::ptx::mbarrier_arrive(&word); }
  __device__ void arrive_expecting(uint32_t bytes) {
    namespace ptx = ::cuda::ptx;
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &word, bytes);
  }
  // Announces bytes without arriving.
  __device__ void expect(uint32_t bytes) {
    namespace ptx = ::cuda::ptx;
    ptx::mbarrier_expect_tx(ptx::sem_relaxed, ptx::scope_cta, ptx::space_shared, &word, bytes);
  }
  // Waits until the phase with this parity has ended. The phase before the first counts as ended and has parity 1.
  __device__ void wait(uint32_t phase) {
    while (!::cuda::ptx::mbarrier_try_wait_parity(&word, phase)) {
    }
  }
  // Like wait, but looks only about twice a microsecond: for waits so long that polling would take issue slots from the
  // other warps.
  __device__ void wait_asleep(uint32_t phase) {
    while (!::cuda::ptx::mbarrier_test_wait_parity(&word, phase)) __nanosleep(500);
  }
  // Like wait, for barriers at which other thread blocks of the cluster arrive.
  __device__ void wait_for_cluster(uint32_t phase) {
    namespace ptx = ::cuda::ptx;
    while (!ptx::mbarrier_try_wait_parity(ptx::sem_acquire, ptx::scope_cluster, &word, phase)) {
    }
  }
  // Like wait, and returns 0. Arithmetic on this zero cannot be moved ahead of the wait, as ptxas else does.
  __device__ float wait_for_zero(uint32_t phase) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(&word));
    float zero;
    int done;
    do {
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%2], %3;\n"
          "selp.b32 %0, 1, 0, p;\nselp.f32 %1, 0f00000000, 0f3f800000, p;\n}"
          : "=r"(done), "=f"(zero)
          : "r"(address), "r"(phase)
          : "memory");
    } while (!done);
    return zero;
  }
};

// Makes initialised barriers visible to TMA and to the other thread blocks of the cluster. The thread that initialised
// them calls it.
__device__ inline void publish_barriers() {
  ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
}

}  // namespace octet::cuda
