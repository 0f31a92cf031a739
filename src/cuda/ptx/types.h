// The 16-bit operand types and how two float32 become one register of them.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace octet::cuda {

using Bf16 = __nv_bfloat16;
using F16 = __half;

}  // namespace octet::cuda

namespace octet::cuda::ptx {

// cvt.rn.{bf16x2, f16x2}.f32: `low` in the lower half. PTX ISA, 9.7.9.21.
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

// The two halves of a register as float32.
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

// ex2.approx.ftz.f32: exactly 1 at 0, 0 at -inf. PTX ISA, 9.7.3.22.
__device__ inline float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace octet::cuda::ptx
