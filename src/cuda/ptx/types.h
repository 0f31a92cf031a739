// Operand types of matrix instructions, and conversions between them and float32.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace octet::cuda {

using Bf16 = __nv_bfloat16;
using F16 = __half;
using E4m3 = __nv_fp8_e4m3;
using S8 = int8_t;
using U8 = uint8_t;

}  // namespace octet::cuda

namespace octet::cuda::ptx {

// cvt.rn.{bf16x2, f16x2}.f32: `low` goes to the lower half. PTX ISA, 9.7.9.21.
template <class T>
__device__ inline uint32_t pack(float low, float high);
template <>
__device__ inline uint32_t pack<Bf16>(float low, float high) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
template <>
__device__ inline uint32_t pack<F16>(float low, float high) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// Packs four numbers into the bytes of one register, x0 in the lowest. Rounds to nearest, ties to even, and saturates.
template <class T>
__device__ inline uint32_t pack(float x0, float x1, float x2, float x3);
// cvt.rn.satfinite.e4m3x2.f32; NaN stays NaN. PTX ISA, 9.7.9.21. Since compute capability 8.9.
template <>
__device__ inline uint32_t pack<E4m3>(float x0, float x1, float x2, float x3) {
  uint32_t d;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(d)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return d;
}
// The same of two numbers, x0 in the lower byte.
__device__ inline uint16_t pack_e4m3(float x0, float x1) {
  uint16_t d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(d) : "f"(x0), "f"(x1));
  return d;
}
// cvt.rni.s32.f32 and cvt.pack.sat, which ptxas fuses into one instruction for two numbers; NaN gives 0. PTX ISA,
// 9.7.9.22.
__device__ inline int nearest(float x) {
  int i;
  asm("cvt.rni.s32.f32 %0, %1;" : "=r"(i) : "f"(x));
  return i;
}
// Packs four integers, saturated.
__device__ inline uint32_t pack_s8(int x0, int x1, int x2, int x3) {
  uint32_t high, d;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(high) : "r"(x3), "r"(x2));
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(x1), "r"(x0), "r"(high));
  return d;
}
template <>
__device__ inline uint32_t pack<S8>(float x0, float x1, float x2, float x3) {
  return pack_s8(nearest(x0), nearest(x1), nearest(x2), nearest(x3));
}
template <>
__device__ inline uint32_t pack<U8>(float x0, float x1, float x2, float x3) {
  uint32_t high, d;
  asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, 0;" : "=r"(high) : "r"(nearest(x3)), "r"(nearest(x2)));
  asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(nearest(x1)), "r"(nearest(x0)), "r"(high));
  return d;
}

// Returns the two halves of a register as float32.
template <class T>
__device__ inline float2 unpack(uint32_t x);
template <>
__device__ inline float2 unpack<Bf16>(uint32_t x) {
  return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}
template <>
__device__ inline float2 unpack<F16>(uint32_t x) {
  return __half22float2(reinterpret_cast<const __half2&>(x));
}

// ex2.approx.ftz.f32: returns exactly 1 at 0, and 0 at -inf. PTX ISA, 9.7.3.22.
__device__ inline float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace octet::cuda::ptx
