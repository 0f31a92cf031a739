// The limit beyond which numbers do not count in means, so that no single token moves a mean by much, whatever it
// holds; the same as octet::mean_limit (core/quant/scale.h).
#pragma once
#include "cuda/operands/vec8.h"

namespace octet::cuda {

// Returns the largest finite magnitude of eight channels.
__device__ inline float largest_finite(const Vec8& x) {
  float most = 0.f;
  for (const float y : x) most = fmaxf(most, fabsf(y));  // ignores NaN
  if (most < INFINITY) return most;
  most = 0.f;
  for (const float y : x) most = fmaxf(most, isfinite(y) ? fabsf(y) : 0.f);
  return most;
}

// Returns the largest power of two below which at most one in `kOneIn` of the magnitudes lies that are not 0, times
// 2^by; returns 0 where all are 0. All threads of a warp call it together; `x` is in shared memory.
template <int kOneIn, int Count>
__device__ float power_above_one_in(const float (&x)[Count], int by) {
  constexpr int kOfLane = Count / 32, kNone = 256;
  static_assert(Count % 32 == 0);
  int exponents[kOfLane], count = 0;
  for (int i = 0; i < kOfLane; ++i) {
    const float number = x[threadIdx.x % 32 + 32 * i];
    exponents[i] = number > 0.f ? __float_as_int(number) >> 23 : kNone;
    count += __popc(__ballot_sync(~0u, number > 0.f));
  }
  int quantile = 0;  // found bit by bit
  for (int bit = kNone / 2; bit; bit /= 2) {
    int below = 0;
    for (const int exponent : exponents) below += __popc(__ballot_sync(~0u, exponent < (quantile | bit)));
    if (below <= (count - 1) / kOneIn) quantile |= bit;
  }
  return count ? __int_as_float(min(max(quantile, 1) + by, 255) << 23) : 0.f;
}

// octet::mean_limit: returns the lower quartile of the largest magnitudes of `Count` tokens, as a power of two, times
// 2^4; returns 0 where all are 0. All threads of a block call it; `largest` and `limit` are in shared memory.
template <int Count>
__device__ float mean_limit(const float (&largest)[Count], float& limit) {
  __syncthreads();
  if (threadIdx.x < 32) {
    const float found = power_above_one_in<4>(largest, 4);
    if (threadIdx.x == 0) limit = found;
  }
  __syncthreads();
  return limit;
}

}  // namespace octet::cuda
