// The exponents of power-of-two scales of the operands of the backward pass, and the scales of dq for sums in integers,
// from the magnitudes of the caller's numbers.
#pragma once
#include <cfloat>

#include "cuda/bwd/params.h"
#include "cuda/bwd/preprocess.h"
#include "cuda/operands/vec8.h"

namespace octet::cuda {

// Bits of headroom below the largest number of the format: with statistics of a sample, for tokens that are not in it,
// and with statistics of all numbers.
constexpr int kRoomOfSample = 4, kRoom = 1;
constexpr int kMaxExponent = 126;

// The largest magnitude and the sum of magnitudes of the finite numbers of a row. norm() is an upper bound of |x|_2, as
// |x|_2^2 <= |x|_1 |x|_inf.
struct Size {
  float most, sum;
  __device__ explicit Size(const Vec8& x) : most(0.f), sum(0.f) {
    for (int i = 0; i < kVec8; ++i) most = fmaxf(most, fabsf(x[i])), sum += fabsf(x[i]);
    if (isfinite(sum)) return;
    most = sum = 0.f;
    for (int i = 0; i < kVec8; ++i)
      if (isfinite(x[i])) most = fmaxf(most, fabsf(x[i])), sum = fminf(sum + fabsf(x[i]), FLT_MAX);
  }
  // Combines the sizes of the threads of a row.
  __device__ void reduce(int vecs) {
    for (int step = vecs / 2; step; step /= 2) {
      most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
      sum += __shfl_xor_sync(~0u, sum, step);
    }
  }
  __device__ float norm() const {
    const float x = fminf(sum, FLT_MAX);
    return most > 0.f ? x * rsqrtf(x) * (most * rsqrtf(most)) : 0.f;
  }
};

// Returns the smallest n with x < 2^n, for x > 0.
__device__ inline int exponent_above(float x) { return ilogbf(x) + 1; }

__device__ inline float power_of_two(int exponent) {
  return __int_as_float((min(max(exponent, -126), 127) + 127) << 23);
}

// P = exp(s - lse) is at most 1, so 2^15 P is a number of f16.
constexpr int kPExponent = 15;

// Returns the exponent of P. Where float32 errs by up to e in a logit of base 2, P errs by a factor of up to 2^e, which
// the exponent makes room for: about 2^-20 of the logit, which is at most scale |q|_2 |k|_2. A token that is not in the
// sample may have 16 times as large ones. With 2^1 P the weights below 2^-15 lose digits; such logits leave few others.
__device__ inline int p_exponent(const PreprocessParams& p, const Sizes& s) {
  const float error = fabsf(p.scale) * 1.44269504f * s.q_row * s.k_row * (16.f * 0x1p-20f);
  return kPExponent - static_cast<int>(fminf(error, kPExponent - 1));
}

// Returns the bound of |dp - delta| / |do| of a row. Dropout multiplies the elements of dp that it keeps.
__device__ inline float dp_per_do(const PreprocessParams& p, const Sizes& s) {
  return p.dropout_scale * s.v_row + s.delta_ratio;
}

// Returns the exponents that bring the largest numbers of each operand below 2^(15 - room), and |do|
// dp_per_do + |dlse|, a bound of |dp - delta + dlse|, below 2^-room. 2^p P times the latter is ds, which thus fits
// f16.
__device__ inline Exponents exponents_for(const PreprocessParams& p, const Sizes& s, int room) {
  Exponents e{};
  if (!p.scaled) return e;
  const auto exponent = [room](float largest) {
    return largest > 0.f ? min(max(15 - room - exponent_above(largest), -kMaxExponent), kMaxExponent) : 0;
  };
  e.q = exponent(s.q), e.k = exponent(fmaxf(s.k, s.k_smooth)), e.v = exponent(s.v), e.do_ = exponent(s.do_);
  if (!p.measures_all_keys) e.k = min(e.k, kMaxKeyExponent);
  e.p = p_exponent(p, s);
  const float row = s.do_row, per_do = dp_per_do(p, s);
  const bool any = row > 0.f && per_do > 0.f;
  int bound = any ? exponent_above(row) + exponent_above(per_do) : -2 * kMaxExponent;
  if (s.dlse > 0.f) bound = max(bound, exponent_above(s.dlse)) + 1;
  if (any || s.dlse > 0.f) e.product = -room - bound - e.do_ - e.v;
  return e;
}

// Returns true if the exponents of the sample can be kept: no number overflows, nor loses many bits to underflow.
__device__ inline bool fits(const Exponents& sample, const Exponents& exact) {
  const auto near = [](int a, int b) { return a - b < kRoom + 1 && a - b > -2 * kRoomOfSample; };
  return near(sample.q, exact.q) && near(sample.k, exact.k) && near(sample.v, exact.v) && near(sample.do_, exact.do_) &&
         near(sample.product + sample.v + sample.do_, exact.product + exact.v + exact.do_);
}

// Returns what |dlse| of a row is divided by when it is added to |do|: about the largest |v| + delta_ratio. It comes
// from the sample, as it must be known when rows are written.
__device__ inline float per_dlse(const Sizes& sampled) {
  const float per_do = sampled.v_row + sampled.delta_ratio;
  return per_do > 0.f ? per_do : 1.f;
}
// Converts a gradient of lse to an equivalent |do|.
__device__ inline float as_row(const Sizes& sampled, float dlse) { return dlse > 0.f ? dlse / per_dlse(sampled) : 0.f; }

// The largest ratio of a row of do of one bin to a typical row of the head, or to the largest row of the bin before.
// Underflow in f16 then changes dq of typical rows by about 2^-24 per key (with P of 1 / keys and dim 64).
constexpr float kSpan = 0x1p13f;

// Returns the upper bound of |do| + |dlse| / per_dlse in a bin that is not the last.
__device__ inline float largest_row(const PreprocessParams& p, const Sizes& sampled, int bin) {
  const float typical = sampled.typical_do_row + as_row(sampled, sampled.typical_dlse);
  if (!p.scaled || !(typical > 0.f)) return INFINITY;
  float most = typical;
  for (int i = 0; i <= bin; ++i) most *= kSpan;
  return most;
}
__device__ inline int bins_of(const PreprocessParams& p, const Sizes& sampled, const Sizes& s) {
  const float most = s.do_row + as_row(sampled, s.dlse);
  int bins = 1;
  while (bins < kBins && most > largest_row(p, sampled, bins - 1)) ++bins;
  return bins;
}

// Returns the sizes of one bin from `s`, those of all queries.
__device__ inline Sizes sizes_of_bin(const PreprocessParams& p, const Sizes& sampled, Sizes s, int bin, int bins) {
  if (bin + 1 == bins) return s;
  const float most = largest_row(p, sampled, bin);
  s.do_ = fminf(s.do_, most), s.do_row = fminf(s.do_row, most), s.dlse = fminf(s.dlse, most * per_dlse(sampled));
  return s;
}

// Returns |delta| / |do| of a row, or 0 where it bounds nothing: rows whose delta is not finite become NaN.
__device__ inline float delta_ratio_of(float delta, float norm) {
  return norm > 0.f && isfinite(delta) ? __fdividef(fabsf(delta), norm) : 0.f;
}

// Returns QueryRows::dq_row_scale of a row from its |do| + |dlse| / per_dlse and the exponent of do.
__device__ inline float dq_row_scale(float bound, int do_exponent) {
  return bound > 0.f ? power_of_two(-exponent_above(bound) - do_exponent) : 1.f;
}

// Returns the scale of sums of dq in integers, which follows from the bound
//   |dq_ic| <= sum_j p_ij |dp_ij - delta_i + dlse_i| |k_jc|
//           <= (|do_i| + |dlse_i| / per_dlse) max(dp_per_do, per_dlse) |k|.
// QueryRows::dq_row_scale accounts for the first factor. Scaled, the bound is below 2^30, one bit below the range of
// int; with kPExponent in the place of e.p, as P may exceed 1 by the difference.
__device__ inline float dq_sums_scale(const PreprocessParams& p, const Sizes& sampled, const Sizes& s,
                                      const Exponents& e) {
  const float per_do = s.dlse > 0.f ? fmaxf(dp_per_do(p, s), per_dlse(sampled)) : dp_per_do(p, s);
  if (!(per_do > 0.f && s.k_smooth > 0.f)) return 1.f;
  return power_of_two(30 - (p.scaled ? kPExponent : 0) - e.product - e.v - exponent_above(per_do) - e.k -
                      exponent_above(s.k_smooth));
}

// Returns the largest number of operand v for which |do| dp_per_do + |dlse| is at most 1, as exponents_for
// requires. |v|_2 is at most sqrt(dim) |v|_inf.
__device__ inline float largest_v(const PreprocessParams& p, const Sizes& s, const Exponents& e) {
  if (!p.scaled || !(s.do_row > 0.f)) return FLT_MAX;
  const double all = ldexp(1.0, -e.product - e.do_ - e.v) - s.dlse;  // the bound of |do| dp_per_do
  const float row = (static_cast<float>(all / s.do_row) - s.delta_ratio) / p.dropout_scale;
  return fminf(ldexpf(row, e.v) * rsqrtf(static_cast<float>(p.v.shape[3])), FLT_MAX);
}

// Maxima of numbers that are at least 0, whose order is that of their bits.
__device__ inline void raise(float& most, float x) { atomicMax(reinterpret_cast<int*>(&most), __float_as_int(x)); }
__device__ inline float warp_max(float x) { return __int_as_float(__reduce_max_sync(~0u, __float_as_int(x))); }
// Raises four successive numbers of Sizes, from `first` on, to the maxima of a warp.
__device__ inline void keep(float& first, float a, float b, float c, float d) {
  a = warp_max(a), b = warp_max(b), c = warp_max(c), d = warp_max(d);
  const int lane = threadIdx.x % 32;
  if (lane < 4) raise((&first)[lane], lane == 0 ? a : lane == 1 ? b : lane == 2 ? c : d);
}

}  // namespace octet::cuda
