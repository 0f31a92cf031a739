// softcap(x) = c tanh(x / c) on vectors, as precise as float32, and its derivative.
#pragma once
#include "cpu/gemm/simd.h"

namespace octet::cpu::OCTET_ISA {

struct Capped {
  Vf x, derivative;
};

// NaN for infinities, which are no products of numbers. With a = |x / c| and e = exp(2 a) - 1, tanh a = e / (e + 2) and
// its derivative is 4 (e + 1) / (e + 2)^2. e = 2^n (2^f - 1) + (2^n - 1) has no cancellation but for small a, where n
// is 0: the polynomial is that of exp2.h without its 1.
OCTET_INLINE Capped softcap(Vf x, float cap) {
  constexpr float kTwoLog2e = 2.88539008177792681472f;
  const Vf sign = floats(bits(x) & static_cast<int32_t>(0x80000000u)), magnitude = floats(bits(x) & 0x7fffffff);
  const Vf z = min(splat(120.f), magnitude * (kTwoLog2e / cap));  // tanh is 1 from 26 on
  const Vf magic = splat(0x1.8p23f), shifted = z + magic, f = z - (shifted - magic);
  Vf p = 0x1.41fbc2p-13f * f + 0x1.5f3e5cp-10f;
  p = p * f + 0x1.3b2d4cp-7f;
  p = p * f + 0x1.c6aee8p-5f;
  p = p * f + 0x1.ebfbdcp-3f;
  p = p * f + 0x1.62e43p-1f;
  const Vf power = floats((bits(shifted) << 23) + 0x3f800000);
  const Vf e = p * f * power + (power - 1.f), inverse = 1.f / (e + 2.f), poison = x * 0.f;
  const Vf capped = floats(bits(e * inverse * cap) | bits(sign));
  // Below 2^-12 the cap takes less than a float has, and z may be too small for one.
  return {(z < splat(0x1p-12f) ? x : capped) + poison, 4.f * (e + 1.f) * inverse * inverse + poison};
}

}  // namespace octet::cpu::OCTET_ISA
