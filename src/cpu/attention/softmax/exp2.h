// 2^x on vectors, as precise as P is going to be.
#pragma once
#include "cpu/gemm/simd.h"

namespace octet::cpu::OCTET_ISA {

// Relative error of exp2<degree>: 1.1e-4, 3.5e-6, 1e-7.
enum Exp2Degree { kExp2For8Bits = 3, kExp2For16Bits = 4, kExp2For32Bits = 6 };

// 2^x: exactly 1 at 0, 0 far below -126, infinity far above 127, NaN for NaN. x = n + f; 2^f by a minimax polynomial
// with p(0) = 1, 2^n by the exponent field.
#if defined(__AVX512F__)
// f in [0, 1). Polynomials of degrees 3 and 4 are also 2 at 1, to which f rounds just below an integer: where the
// logits of a row are nearly equal all P are nearly 1, and an error that they share would be one of l.
template <int degree = kExp2For32Bits>
OCTET_INLINE Vf exp2(Vf x) {
  const Vf f = _mm512_reduce_ps(x, 1);  // x - floor(x); 0 for -inf
  Vf p;
  if constexpr (degree == kExp2For8Bits) {
    p = 0x1.4095eap-4f * f + 0x1.cf7a66p-3f;
    p = p * f + 0x1.640ea8p-1f;
  } else if constexpr (degree == kExp2For16Bits) {
    p = 0x1.bc31dcp-7f * f + 0x1.aa3fc8p-5f;
    p = p * f + 0x1.ee5884p-3f;
    p = p * f + 0x1.62d51cp-1f;
  } else {
    p = 0x1.c54194p-13f * f + 0x1.46d64p-10f;
    p = p * f + 0x1.3d0b94p-7f;
    p = p * f + 0x1.c6891p-5f;
    p = p * f + 0x1.ebfd58p-3f;
    p = p * f + 0x1.62e42cp-1f;
  }
  return _mm512_scalef_ps(p * f + 1.f, x);
}
#else
// f in [-1/2, 1/2]
template <int degree = kExp2For32Bits>
OCTET_INLINE Vf exp2(Vf x) {
  const Vf magic = splat(0x1.8p23f);
  const Vf bounded = min(splat(128.f), max(splat(-126.f), x));
  const Vf shifted = bounded + magic;
  const Vf f = bounded - (shifted - magic);
  Vf p;
  if constexpr (degree <= kExp2For16Bits) {
    p = 0x1.3a02d8p-7f * f + 0x1.c9fc6p-5f;
    p = p * f + 0x1.ec0378p-3f;
    p = p * f + 0x1.62e12cp-1f;
  } else {
    p = 0x1.41fbc2p-13f * f + 0x1.5f3e5cp-10f;
    p = p * f + 0x1.3b2d4cp-7f;
    p = p * f + 0x1.c6aee8p-5f;
    p = p * f + 0x1.ebfbdcp-3f;
    p = p * f + 0x1.62e43p-1f;
  }
  p = p * f + 1.f;
  const Vf y = floats(bits(p) + (bits(shifted) << 23));
  return x < splat(-126.f) ? Vf{} : y;
}
#endif

}  // namespace octet::cpu::OCTET_ISA
