// Where the backward pass limits P.
#pragma once
#include <type_traits>

#include "cuda/bwd/params.h"
#include "cuda/ptx/types.h"

namespace octet::cuda {

// P is multiplied by 2^this before it is rounded to the type of operands: it is at most 1, so 2^15 P is a number of
// f16.
template <class T>
constexpr int kPExponentOf = std::is_same_v<T, F16> ? 15 : 0;

// P = exp(s - lse) is at most 1, but where float32 errs by e in a logit of base 2, P errs by a factor of 2^e, and 2^15
// P leaves f16 from e = 1 on, which takes logits of 2^20 or more. Returns whether these may be so large that P must be
// limited to 1. `factor` brings products of the operands q and k to base 2. The largest numbers of both operands are
// about 2^11 where their exponents are those of a sample (kRoomOfSample), 2^14 where they are exact (kRoom), and at
// most 2^15: a logit of 2^20 is found unless all channels of a query and a key are that large. Ordinary inputs stay far
// below.
__device__ inline bool limits_p(const BackwardParams& a, float factor) {
  return a.p_exponent && fabsf(factor) * static_cast<float>(a.dim) * 0x1p22f >= 0x1p16f;
}

}  // namespace octet::cuda
