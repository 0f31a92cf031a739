// Tasks that add to one place in memory take turns, so that the order of its sums does not depend on threads.
#pragma once
#include <cstdint>
#include <thread>

#include "cpu/gemm/simd.h"

namespace octet::cpu::OCTET_ISA {

// Waits until `turn` is `number`. Tasks start in ascending order, so the task that has the turn has started.
inline void wait_for_turn(const int32_t* turn, int32_t number) {
  for (int spins = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != number; ++spins) {
    if (spins > 64) std::this_thread::yield();
#ifdef __x86_64__
    else
      _mm_pause();
#endif
  }
}

inline void end_turn(int32_t* turn, int32_t number) { __atomic_store_n(turn, number + 1, __ATOMIC_RELEASE); }

}  // namespace octet::cpu::OCTET_ISA
