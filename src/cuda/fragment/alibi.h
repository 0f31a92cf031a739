// ALiBi: a logit loses slope |i + (m - n) - j|, for query i of n and key j of m. Kernels leave out the row bias, the
// largest number that this adds to a logit of the row: it changes nothing but lse, and a large one would take the bits
// of the logits.
#pragma once
#include <cmath>
#include <cstdint>

#include "cuda/fragment/finish.h"
#include "cuda/fragment/mask.h"
#include "cuda/fragment/precision.h"

namespace octet::cuda {

// A precision with ALiBi.
template <class Precision>
struct WithAlibi : Precision {};
template <class Precision>
constexpr bool kHasAlibi = false;
template <class Precision>
constexpr bool kHasAlibi<WithAlibi<Precision>> = true;
template <class Precision>
constexpr bool kCompensated<WithAlibi<Precision>> = kCompensated<Precision>;

struct AlibiSlopes {
  const float* data;  // [sequence, head]; null: there are none
  int64_t sequence_stride, head_stride;

  // Returns NaN for a slope that is not finite.
  __device__ float at(int sequence, int head) const {
    const float slope = data[sequence * sequence_stride + head * head_stride];
    return isfinite(slope) ? slope : NAN;
  }
};

// Returns a slope in base 2. One beyond 2^100 leaves a row its nearest keys alone, as 2^100 does, which times any
// distance is finite.
__device__ inline float slope_log2(float slope) {
  constexpr float kMost = 0x1p100f;
  return isnan(slope) ? slope : fminf(fmaxf(slope * kLog2e, -kMost), kMost);
}

// True for slopes in base 2 whose terms are linear in the key to a few units in the last place of the float that the
// distance to the other end of a tile gives: 2^-16 of a logit. Steeper ones, which hardly leave a row more than one
// key, and negative ones take their terms from distances.
__device__ inline bool is_gentle(float slope) { return 0.f <= slope && slope <= 1.5f; }

// The term of each key in a row: its logit loses slope (|diagonal - key| - nearest).
struct AlibiRow {
  int diagonal;  // the key at distance 0
  int nearest;   // the distance whose term is the row bias

  // Returns that of a query that sees `seen`.
  static __device__ AlibiRow of(float slope, int diagonal, const Interval& seen) {
    const int first = diagonal - seen.first, last = diagonal - (seen.last - 1);  // distances of the ends
    const int nearest = slope < 0.f ? max(abs(first), abs(last)) : max(max(-first, last), 0);
    return {diagonal, seen.first < seen.last ? nearest : 0};
  }
  __device__ float row_bias(float slope) const { return -slope * static_cast<float>(nearest); }
  // Returns the term of a key, without the row bias.
  __device__ float term(float slope, int key) const {
    return -slope * static_cast<float>(abs(diagonal - key) - nearest);
  }
};

}  // namespace octet::cuda
