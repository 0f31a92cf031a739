// Statistics of k and v over the seen tokens of one sequence and head: means, and the scales of channels.
#pragma once
#include <cmath>

#include "cpu/attention/pack/key_side.h"
#include "cpu/attention/pack/rows.h"

namespace octet::cpu::OCTET_ISA {

// mean_limit of a sample of the seen tokens of a head of k or v.
inline float limit_of(const View& t, const Sequence& seq, int64_t g, const SeenTokens& seen) {
  alignas(64) float row[kMaxDim];
  float largest[kSampledTokens];
  int64_t sampled = 0;
  const int64_t width = padded_columns(t.shape[3]);
  seen.for_sample([&](int64_t token) {
    load_numbers(t, seq.batch, g, seq.k_first + token, 1, 1, width, row);
    largest[sampled++] = finite_amax(row, width);
  });
  return mean_limit(largest, sampled);
}

// Scales below 2^-110 have no inverse, and products of large scales no room. So v is
// divided by a power of two, and the epilogue multiplies o by it: by 2^e where the exponent e of `limit` (mean_limit)
// says that all values are small or all are large, else by 1.
inline float range_of_values(float limit) {
  if (limit == 0.f) return 1.f;
  const int exponent = limit < __builtin_inff() ? std::ilogb(limit) : 128;
  return std::abs(exponent) < 64 ? 1.f : std::ldexp(1.f, std::clamp(exponent, -126, 126));
}

// Channel means of k, and of v with its channel amax, over the seen tokens of one sequence and head; in token order, in
// double, rounded once. Any mean is correct, and a token must not reach queries that do not see it: mean_limit.
inline void channel_statistics(const Problem& p, const ForwardNumerics& numerics, const Sequence& seq, int64_t g,
                               int64_t side, const SeenTokens& seen, const KeySide& s) {
  const auto tokens = static_cast<double>(std::max<int64_t>(seen.count(), 1));
  const auto for_seen = [&](auto&& body) OCTET_INLINE_LAMBDA {
    for (int64_t j = seen.range.first; j < seen.range.last; ++j)
      if (seen[j]) body(seq.k_first + j);
  };
  const auto mean_of = [&](const View& t, bool prequantized, int64_t n, float* mean) {
    std::memset(mean, 0, sizeof(float) * kMaxDim);
    if (prequantized) {
      for (int64_t c = 0; c < n; ++c) mean[c] = prequantized_mean(t, seq.batch, g, c);
      return;
    }
    alignas(64) double sum[kMaxDim];
    const float limit = limit_of(t, seq, g, seen);
    with_vectors(n, [&](int vectors) OCTET_INLINE_LAMBDA {
      RowVectors x;
      Doubles sums[kMaxDim / kLanes] = {};
      for_seen([&](int64_t token) OCTET_INLINE_LAMBDA {
        load_numbers_row(t, seq.batch, g, token, x, vectors);
        for (int v = 0; v < vectors; ++v) sums[v].add(floats(bits(x[v]) & 0x7fffffff) < splat(limit) ? x[v] : Vf{});
      });
      for (int v = 0; v < vectors; ++v) sums[v].store(sum + v * kLanes);
    });
    for (int64_t c = 0; c < n; ++c) mean[c] = static_cast<float>(sum[c] / tokens);
  };
  if (numerics.smooth_k) mean_of(p.k, numerics.k_prequantized, p.dim, s.k_mean + side * kMaxDim);
  if (numerics.smooth_v) mean_of(p.v, numerics.v_prequantized, p.dim_v, s.v_mean + side * kMaxDim);
  if (s.v_range) s.v_range[side] = numerics.v_prequantized ? 1.f : range_of_values(limit_of(p.v, seq, g, seen));
  if (numerics.v_scale == VScale::channel) {
    float* top = s.v_channel + side * kMaxDim;
    float row[kMaxDim];
    for (int64_t c = 0; c < p.dim_v; ++c) top[c] = 0.f;
    for_seen([&](int64_t token) {
      load_numbers(p.v, seq.batch, g, token, 1, 1, p.dim_v, row);
      for (int64_t c = 0; c < p.dim_v; ++c) {
        const float a = __builtin_fabsf(row[c]);
        top[c] = a > top[c] && a < __builtin_inff() ? a : top[c];
      }
    });
    for (int64_t c = 0; c < p.dim_v; ++c) top[c] *= 1.f / s.v_range[side];
  }
}

}  // namespace octet::cpu::OCTET_ISA
