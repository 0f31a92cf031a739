// Barriers in shared memory and rings of stages between the warp that loads and the warpgroups that compute.
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
  // Until the phase of this parity has ended; the phase before the first counts as ended with parity 1.
  __device__ void wait(uint32_t parity) {
    while (!::cuda::ptx::mbarrier_try_wait_parity(&word, parity)) {
    }
  }
};

// Where one side of a ring of `Stages` stages stands. The loader waits for the parity opposite to the reader's.
template <int Stages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == Stages) stage = 0, parity ^= 1;
  }
};

// `full`: the bytes of a stage have come. `empty`: all readers are done with it.
template <int Stages>
struct Ring {
  Barrier full[Stages], empty[Stages];

  __device__ void init(uint32_t readers) {
    for (int i = 0; i < Stages; ++i) full[i].init(1), empty[i].init(readers);
  }
};

}  // namespace octet::cuda
