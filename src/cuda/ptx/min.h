// Minima that keep NaN.
#pragma once

namespace octet::cuda::ptx {

// min.NaN.f32: the smaller one, or NaN if either is. PTX ISA, 9.7.3.11.
__device__ inline float min_or_nan(float x, float y) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(y));
  return least;
}

}  // namespace octet::cuda::ptx
