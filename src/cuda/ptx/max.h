// Maxima that keep NaN.
#pragma once

namespace octet::cuda::ptx {

// max.NaN.f32: the larger one, or NaN if either is. PTX ISA, 9.7.3.12.
__device__ inline float max_or_nan(float x, float y) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
  return most;
}

}  // namespace octet::cuda::ptx
