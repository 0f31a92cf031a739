// The end of a block of queries: o / l with what quantization took from v, and lse with the sink.
#pragma once
#include <cmath>

#include "cpu/attention/fwd/rows.h"
#include "cpu/attention/pack/key_side.h"
#include "cpu/attention/pack/queries.h"
#include "cpu/sinks.h"

namespace octet::cpu::OCTET_ISA {

// Returns lse of the keys alone, for the caller's k: smoothing moved every logit of the row by scale q.mean,
// which a softcap needs back before.
template <PFormat format, int64_t block_rows>
inline double lse_of_keys(const Problem& p, const ForwardNumerics& numerics, const QueryRows& queries,
                          const RowState<block_rows>& state, int64_t i, float l) {
  const double scale = static_cast<double>(state.softmax_scale_log2[i]) / 1.44269504088896340736;
  const double unit = static_cast<double>(state.unit) * (scales_p(format) ? numerics.p_top : 1.f);
  const double value = state.m[i] * scale + std::log(l / unit);
  return state.row_bias[i] + (numerics.smooth_k && p.softcap == 0.f ? value + p.scale * queries.mean_logit[i] : value);
}

// Stores rows of o / l, what rounding left out of them, and lse.
template <PFormat format, int64_t block_rows>
inline void store_rows(const Problem& p, const ForwardNumerics& numerics, const KeySide& side, const Sequence& seq,
                       int64_t h, int64_t token, int64_t rows, int64_t side_index, const QueryRows& queries,
                       const RowState<block_rows>& state, float* o_rows) {
  const int64_t columns = side.v_columns;
  float rounded[kMaxDim];
  const float sink = sink_of(p, seq.batch, h);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t at = seq.q_first + token + i;
    float* o = o_rows + i * columns;
    const float l = reduce_add(load(state.l[i]));
    const bool seen = l != 0.f;
    const float inverse = seen ? 1.f / l : 0.f;
    for (int64_t c = 0; c < columns; ++c) o[c] = seen ? o[c] * inverse : 0.f;
    if (side.v_channel)
      for (int64_t c = 0; c < p.dim_v; ++c)
        o[c] *= scale_of(side.v_channel[side_index * kMaxDim + c], largest_quantized(numerics.v)).scale;
    if (const float range = side.v_range ? side.v_range[side_index] : 1.f; range != 1.f)
      for (int64_t c = 0; c < p.dim_v; ++c) o[c] *= range;
    if (numerics.smooth_v && seen)
      for (int64_t c = 0; c < p.dim_v; ++c) o[c] += side.v_mean[side_index * kMaxDim + c];
    if (p.lse.present() || sink != kMinusInfinity) {
      const double of_keys = seen ? lse_of_keys<format>(p, numerics, queries, state, i, l) : kMinusInfinity,
                   lse = with_sink(of_keys, sink);
      if (sink != kMinusInfinity) scale_row(o, static_cast<float>(probability_of(of_keys, lse)), columns);
      if (p.lse.present()) *p.lse.at<float>(seq.batch, h, at) = static_cast<float>(lse);
    }
    if (p.dropout) scale_row(o, static_cast<float>(p.dropout_scale()), columns);
    store_row(p.o, seq.batch, h, at, o);
    if (p.o_residual.present()) {
      std::memcpy(rounded, o, sizeof(float) * p.dim_v);
      round_row(p.o.dtype, rounded, p.dim_v);
      store_residual(p.o_residual, seq.batch, h, at, p.o.dtype, o, rounded);
    }
  }
}

}  // namespace octet::cpu::OCTET_ISA
