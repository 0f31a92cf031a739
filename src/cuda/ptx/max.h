// Maxima that keep NaN.
#pragma once

namespace octet::cuda::ptx {

// max.NaN.f32: the larger number, or NaN where one of them is NaN. PTX ISA, 9.7.3.12.
__device__ inline float max_or_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

}  // namespace octet::cuda::ptx
