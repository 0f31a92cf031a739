// Rounding of vectors of floats to the numbers of a narrower format.
#pragma once
#include "cpu/gemm/simd.h"

namespace octet::cpu::OCTET_ISA {

// Nearest bf16, ties to even; NaN stays NaN.
OCTET_INLINE Vf round_bf16(Vf x) {
  const Vi i = bits(x);
  const Vf rounded = floats((i + 0x7fff + (i >> 16 & 1)) & static_cast<int32_t>(0xffff0000));
  return x == x ? rounded : x;
}

// Nearest of the numbers with `mantissa` bits and smallest normal exponent `min_exponent`: e4m3 is <3, -6>, f16
// <10, -14>. No overflow.
template <int mantissa, int min_exponent>
OCTET_INLINE Vf round_narrow(Vf x) {
  constexpr int drop = 23 - mantissa;
  const Vi i = bits(x);
  const Vf normal = floats((i + ((1 << (drop - 1)) - 1) + (i >> drop & 1)) & ~((1 << drop) - 1));
  const Vf magnitude = floats(i & 0x7fffffff);
  const Vf magic = splat(1.5f * static_cast<float>(1 << drop) * (min_exponent == -6 ? 0x1p-6f : 0x1p-14f));
  const Vf subnormal = (x + magic) - magic;
  return magnitude < splat(min_exponent == -6 ? 0x1p-6f : 0x1p-14f) ? subnormal : x == x ? normal : x;
}

// Nearest number of f16 times a power of two of its own, ties to even: 11 bits and the range of a float. NaN stays NaN.
OCTET_INLINE Vf round_11_bits(Vf x) {
  const Vi i = bits(x);
  const Vf rounded = floats((i + 0xfff + (i >> 13 & 1)) & ~0x1fff);
  return x == x ? rounded : x;
}

OCTET_INLINE Vf round_f16(Vf x) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
  const Vf rounded = round_narrow<10, -14>(x);
  const Vf infinity = splat(__builtin_inff());
  return rounded > splat(65504.f) ? infinity : rounded < splat(-65504.f) ? -infinity : rounded;
#endif
}

// Saturates at 448, infinities too; NaN stays NaN.
OCTET_INLINE Vf round_e4m3(Vf x) { return round_narrow<3, -6>(max(splat(-448.f), min(splat(448.f), x))); }

}  // namespace octet::cpu::OCTET_ISA
