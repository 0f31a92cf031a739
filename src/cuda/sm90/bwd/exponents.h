// The exponents of two that operands of the backward pass are multiplied by, and what dq is summed in as integers, from
// how large numbers are.
#pragma once
#include <cfloat>

#include "cuda/preprocess/vec8.h"
#include "cuda/sm90/bwd/params.h"
#include "cuda/sm90/bwd/preprocess.h"

namespace octet::cuda::sm90 {

// Bits below the largest number allowed that are left free: by the sample, for tokens that it has not seen, and where
// all are known.
constexpr int kRoomOfSample = 4, kRoom = 1;
constexpr int kMaxExponent = 126;

// Of numbers that are finite: the largest magnitude and the sum of magnitudes. |x|_2^2 <= |x|_1 |x|_inf.
struct Size {
  float most, sum;
  __device__ explicit Size(const Vec8& x) : most(0.f), sum(0.f) {
    for (int i = 0; i < kVec8; ++i) most = fmaxf(most, fabsf(x[i])), sum += fabsf(x[i]);
    if (isfinite(sum)) return;
    most = sum = 0.f;
    for (int i = 0; i < kVec8; ++i)
      if (isfinite(x[i])) most = fmaxf(most, fabsf(x[i])), sum = fminf(sum + fabsf(x[i]), FLT_MAX);
  }
  // Over the threads of a row.
  __device__ void reduce(int lines) {
    for (int step = lines / 2; step; step /= 2) {
      most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
      sum += __shfl_xor_sync(~0u, sum, step);
    }
  }
  __device__ float norm() const {
    const float x = fminf(sum, FLT_MAX);
    return most > 0.f ? x * rsqrtf(x) * (most * rsqrtf(most)) : 0.f;
  }
};

// Smallest n with x < 2^n; x > 0.
__device__ inline int exponent_above(float x) { return ilogbf(x) + 1; }

__device__ inline float power_of_two(int exponent) {
  return __int_as_float((min(max(exponent, -126), 127) + 127) << 23);
}

// Exponents that bring the largest numbers of each operand to below 2^(15 - room), and |do| (|v| + reach) + |dlse|,
// which bounds |dp - delta + dlse|, to below 2^-room: times 2^15 p it is ds, a number of f16.
__device__ inline Exponents exponents_for(const PreprocessParams& p, const Sizes& s, int room) {
  Exponents e{};
  if (!p.scaled) return e;
  const auto exponent = [room](float largest) {
    return largest > 0.f ? min(max(15 - room - exponent_above(largest), -kMaxExponent), kMaxExponent) : 0;
  };
  e.q = exponent(s.q), e.k = exponent(fmaxf(s.k, s.k_smooth)), e.v = exponent(s.v), e.do_ = exponent(s.do_);
  if (!p.k_tiles) e.k = min(e.k, kMaxKeyExponent);
  const float row = s.do_row, reach = s.v_row + s.reach;
  const bool any = row > 0.f && reach > 0.f;
  int bound = any ? exponent_above(row) + exponent_above(reach) : -2 * kMaxExponent;
  if (s.dlse > 0.f) bound = max(bound, exponent_above(s.dlse)) + 1;
  if (any || s.dlse > 0.f) e.product = -room - bound - e.do_ - e.v;
  return e;
}

// Whether the sample's exponents may stay: no number leaves its format, nor lies far below it.
__device__ inline bool fits(const Exponents& sample, const Exponents& exact) {
  const auto near = [](int a, int b) { return a - b < kRoom + 1 && a - b > -2 * kRoomOfSample; };
  return near(sample.q, exact.q) && near(sample.k, exact.k) && near(sample.v, exact.v) && near(sample.do_, exact.do_) &&
         near(sample.product + sample.v + sample.do_, exact.product + exact.v + exact.do_);
}

// What |dlse| of a row is divided by when it is added to |do|: about the largest |v| + reach, by the sample, which is
// known when rows are written.
__device__ inline float per_dlse(const Sizes& sampled) {
  const float reach = sampled.v_row + sampled.reach;
  return reach > 0.f ? reach : 1.f;
}
// A gradient of lse as if it were |do|.
__device__ inline float as_row(const Sizes& sampled, float dlse) { return dlse > 0.f ? dlse / per_dlse(sampled) : 0.f; }

// How far rows of do of one part may lie above a typical row of their head, or of the part before. What rounding to the
// least numbers of f16 costs the dq of typical rows is then some 2^-24 of it for each key (P of 1 / keys, dim
// 64).
constexpr float kSpan = 0x1p13f;

// What |do| + |dlse| / per_dlse of rows of a part is at most, if it is not the last.
__device__ inline float largest_row(const PreprocessParams& p, const Sizes& sampled, int part) {
  const float typical = sampled.typical_do_row + as_row(sampled, sampled.typical_dlse);
  if (!p.scaled || !(typical > 0.f)) return INFINITY;
  float most = typical;
  for (int i = 0; i <= part; ++i) most *= kSpan;
  return most;
}
__device__ inline int parts_of(const PreprocessParams& p, const Sizes& sampled, const Sizes& s) {
  const float most = s.do_row + as_row(sampled, s.dlse);
  int parts = 1;
  while (parts < kParts && most > largest_row(p, sampled, parts - 1)) ++parts;
  return parts;
}

// The sizes of what a part has, `s` being those of all queries.
__device__ inline Sizes sizes_of_part(const PreprocessParams& p, const Sizes& sampled, Sizes s, int part, int parts) {
  if (part + 1 == parts) return s;
  const float most = largest_row(p, sampled, part);
  s.do_ = fminf(s.do_, most), s.do_row = fminf(s.do_row, most), s.dlse = fminf(s.dlse, most * per_dlse(sampled));
  return s;
}

// What integers of dq's sums are:
//   |dq_ic| <= sum_j p_ij |dp_ij - delta_i + dlse_i| |k_jc| <= (|do_i| + |dlse_i| / per_dlse) max(|v| + reach,
//   per_dlse) |k|
// of which QueryRows::dq_unit knows the first factor. It comes to below 2^30, a bit below what an int holds.
__device__ inline float dq_sums_unit(const PreprocessParams& p, const Sizes& sampled, const Sizes& s,
                                     const Exponents& e) {
  const float reach = s.dlse > 0.f ? fmaxf(s.v_row + s.reach, per_dlse(sampled)) : s.v_row + s.reach;
  if (!(reach > 0.f && s.k_smooth > 0.f)) return 1.f;
  return power_of_two(30 - p.weight_exponent - e.product - e.v - exponent_above(reach) - e.k -
                      exponent_above(s.k_smooth));
}

// The largest number of v, as operand, for which |do| (|v| + reach) + |dlse| is at most 1, as exponents_for asks; |v|_2
// is at most sqrt(dim) |v|_inf.
__device__ inline float largest_v(const PreprocessParams& p, const Sizes& s, const Exponents& e) {
  if (!p.scaled || !(s.do_row > 0.f)) return FLT_MAX;
  const double all = ldexp(1.0, -e.product - e.do_ - e.v) - s.dlse;  // of |do| (|v| + reach)
  const float row = static_cast<float>(all / s.do_row) - s.reach;
  return fminf(ldexpf(row, e.v) * rsqrtf(static_cast<float>(p.v.shape[3])), FLT_MAX);
}

// Of numbers that are at least 0, which order as their bits do.
__device__ inline void raise(float& most, float x) { atomicMax(reinterpret_cast<int*>(&most), __float_as_int(x)); }
__device__ inline float warp_max(float x) { return __int_as_float(__reduce_max_sync(~0u, __float_as_int(x))); }

}  // namespace octet::cuda::sm90
