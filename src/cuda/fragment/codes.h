// Codes of 8 bits as numbers of f16, which has all of int8 and of e4m3, for matrix products of f16.
#pragma once
#include <cstdint>
#include <type_traits>

#include "cuda/ptx/types.h"

namespace octet::cuda {

// Which bytes of a word become a pair: neighbours, or every second one.
enum class Pairs { neighbours, alternate };

__device__ inline uint32_t f16_pair(__half2 x) { return reinterpret_cast<const uint32_t&>(x); }
__device__ inline __half2 as_pair(uint32_t x) { return reinterpret_cast<const __half2&>(x); }

// cvt.rn.f16x2.e4m3x2. PTX ISA, 9.7.9.21. Since compute capability 8.9.
__device__ inline uint32_t e4m3_pair(uint16_t x) {
  uint32_t d;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(x));
  return d;
}

// Turns four codes into two pairs: bytes (0, 1) and (2, 3) or, alternate, (0, 2) and (1, 3).
template <class Code, Pairs pairs>
__device__ void codes_to_f16(uint32_t codes, uint32_t (&to)[2]) {
  constexpr bool kNeighbours = pairs == Pairs::neighbours;
  if constexpr (std::is_same_v<Code, S8>) {
    // 1024 + x has the bits of x, for x up to 1023, below 0x6400.
    codes ^= 0x80808080u;
    const __half2 begin = as_pair(0x64806480u);  // 1024 + 128
    to[0] = f16_pair(__hsub2(as_pair(__byte_perm(codes, 0x64646464u, kNeighbours ? 0x4140 : 0x4240)), begin));
    to[1] = f16_pair(__hsub2(as_pair(__byte_perm(codes, 0x64646464u, kNeighbours ? 0x4342 : 0x4341)), begin));
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    if (!kNeighbours) codes = __byte_perm(codes, 0, 0x3120);
    to[0] = e4m3_pair(static_cast<uint16_t>(codes)), to[1] = e4m3_pair(static_cast<uint16_t>(codes >> 16));
#else
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned of_first = kNeighbours ? 0x1404 : 0x2404, of_second = kNeighbours ? 0x3424 : 0x3414;
      const uint32_t upper = __byte_perm(codes, 0, i ? of_second : of_first);
      // The exponent of f16 is one bit longer, and 8 more of the same number.
      const uint32_t bits = (upper & 0x80008000u) | (upper >> 1 & 0x3f803f80u);
      const uint32_t nan = ((upper & 0x7f007f00u) + 0x01000100u) >> 15 & 0x00010001u;
      to[i] = f16_pair(__hmul2(as_pair(bits), as_pair(0x5c005c00u))) | nan * 0x7c00u;
    }
#endif
  }
}

}  // namespace octet::cuda
