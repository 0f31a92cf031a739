// Numbers of e4m3 without the instructions for them, which GPUs have since compute capability 8.9.
#pragma once

namespace octet::cuda {

constexpr float kLargestE4m3 = 448.f, kLeastNormalE4m3 = 0x1p-6f;

// Returns the nearest number with the four bits of e4m3, ties to even, of one that is not negative. 2^20 times the
// power of two in x has the units of e4m3 as its last place, as 2^14 has those of the numbers below the smallest normal
// one. NaN stays NaN, and larger numbers than e4m3's do not saturate.
__device__ inline float round_to_e4m3(float x) {
  const float power = __uint_as_float(__float_as_uint(fmaxf(x, kLeastNormalE4m3)) & 0x7f800000u);
  return __fmaf_rn(power, -0x1p20f, __fmaf_rn(power, 0x1p20f, x));
}

// Returns the byte of a number of e4m3: 2^-120 of it has the exponent and the fraction of e4m3 as its upper bits.
__device__ inline unsigned e4m3_code(float x) {
  const unsigned magnitude = isnan(x) ? 0x7f : __float_as_uint(fabsf(x) * 0x1p-120f) >> 20;
  return (__float_as_uint(x) >> 24 & 0x80) | magnitude;
}

}  // namespace octet::cuda
