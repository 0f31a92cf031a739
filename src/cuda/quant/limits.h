// Means without numbers far beyond typical ones, so that a token moves them by little, whatever it holds, as
// octet::mean_limit (core/quant/scale.h) has it.
#pragma once
#include "cuda/quant/elements.h"

namespace octet::cuda {

// The largest finite magnitude of eight channels.
__device__ inline float largest_finite(const Vector& x) {
  float most = 0.f;
  for (const float y : x) most = fmaxf(most, isfinite(y) ? fabsf(y) : 0.f);
  return most;
}

// octet::mean_limit: of the largest magnitudes of `Count` tokens the lower quartile, as a power of two, times 2^4; 0
// where all are 0. All threads of a block call it; `largest` and `limit` are in shared memory.
template <int Count>
__device__ float mean_limit(const float (&largest)[Count], float& limit) {
  constexpr int kOfLane = Count / 32, kNone = 256;
  static_assert(Count % 32 == 0);
  __syncthreads();
  if (threadIdx.x < 32) {
    int exponents[kOfLane], count = 0;
    for (int i = 0; i < kOfLane; ++i) {
      const float x = largest[threadIdx.x + 32 * i];
      exponents[i] = x > 0.f ? __float_as_int(x) >> 23 : kNone;
      count += __popc(__ballot_sync(~0u, x > 0.f));
    }
    // The largest exponent that no more than a quarter are below, bit by bit.
    int quartile = 0;
    for (int bit = kNone / 2; bit; bit /= 2) {
      int below = 0;
      for (const int exponent : exponents) below += __popc(__ballot_sync(~0u, exponent < (quartile | bit)));
      if (below <= (count - 1) / 4) quartile |= bit;
    }
    if (threadIdx.x == 0) limit = count ? __int_as_float(min(max(quartile, 1) + 4, 255) << 23) : 0.f;
  }
  __syncthreads();
  return limit;
}

}  // namespace octet::cuda
