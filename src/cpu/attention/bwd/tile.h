// One tile of p and ds: from logits to rounded operands.
#pragma once
#include "cpu/attention/bwd/rounding.h"
#include "cpu/attention/softmax/softmax.h"

namespace octet::cpu::OCTET_ISA {

// `up` puts the largest p, 1, where the small ones keep their bits; a power of two.
template <GradientFormat format>
OCTET_INLINE Vf round_p(Vf p, float up) {
  if constexpr (format == GradientFormat::bf16) return round_bf16(p);
  if constexpr (format == GradientFormat::f16) return round_f16(p * up) * (1.f / up);
  if constexpr (format == GradientFormat::e4m3) return round_e4m3(p * 256.f) * 0x1p-8f;
  return p;
}

// `any_range`: not that of f16, which do of very different rows would leave.
template <GradientFormat format>
OCTET_INLINE Vf round_ds(Vf ds, bool any_range) {
  if constexpr (format == GradientFormat::bf16) return round_bf16(ds);
  if constexpr (format == GradientFormat::f16) return any_range ? round_11_bits(ds) : round_f16(ds);
  return ds;
}

// A row as the tile needs it.
struct GradientRow {
  TileRow keys;
  float to_logit, softmax_scale_log2;  // load_logits
  float lse, delta;
  float p_up;         // a power of two around the rounding of p to f16
  bool any_range;     // round_ds
  bool apply_cap;     // ds with the derivative of the softcap
  float* derivative;  // with a softcap: receives its derivative
  float* ds_sum;      // with a softcap: receives the sum of ds before rounding
  float* bias_ds;     // with dmask: receives ds before rounding and without the derivative of the softcap
};

// s becomes p, dp becomes ds. Keys that the row does not see give exact zeros, whatever they hold.
template <GradientFormat format, bool partial>
OCTET_INLINE void gradient_row(const GradientRow& row, float* s, float* dp) {
  Vf x[kVectors], derivative[kVectors], sum{};
  load_logits<partial>(s, row.keys, row.to_logit, x, derivative);
  const bool capped = partial && row.keys.terms.softcap != 0.f, for_dmask = partial && row.bias_ds;
  for (int v = 0; v < kVectors; ++v) {
    // At most 1, also where float32 errs by much in large logits; NaN stays NaN.
    Vf p = min(splat(1.f), exp2(x[v] * row.softmax_scale_log2 - row.lse));
    Vf ds = p * (load(dp + v * kLanes) - row.delta);
    if constexpr (partial) {
      if (for_dmask) store(row.bias_ds + v * kLanes, x[v] == kMinusInfinity ? Vf{} : ds);
      if (capped) {
        if (row.apply_cap) ds *= derivative[v];
        store(row.derivative + v * kLanes, derivative[v]);
      }
      p = x[v] == kMinusInfinity ? Vf{} : p;
      ds = x[v] == kMinusInfinity ? Vf{} : ds;
      if (capped) sum += ds;
    }
    store(s + v * kLanes, round_p<format>(p, row.p_up));
    store(dp + v * kLanes, round_ds<format>(ds, row.any_range));
  }
  if (capped) *row.ds_sum = reduce_add(sum);
}

// Calls body(row, partial) for the rows of a tile: partial is a compile-time constant. `row_bias`, `mean_logit`: of
// these rows, or null.
template <class Body>
OCTET_INLINE void for_rows(const Problem& p, const Sequence& seq, int64_t h, int64_t token, int64_t rows, int64_t key,
                           const float* row_bias, const float* mean_logit, const Body& body) {
  const bool plain = p.plain_logits();
  TileRow row{nullptr, nullptr, 0, 0, nullptr, p.mask.dtype, p.mask.stride[3], 0.f};
  for (int64_t i = 0; i < rows; ++i) {
    const KeyRange seen = p.keys_of(token + i, seq.q_tokens, seq.k_tokens);
    row.first = static_cast<int>(seen.first > key ? seen.first - key : 0);
    row.last = static_cast<int>(seen.last < key + kKeys ? seen.last - key : kKeys);
    if (p.mask.present()) row.mask = mask_row(p, seq.batch, h, token + i, key);
    if (row_bias) row.row_bias = row_bias[i];
    if (!plain) row.terms = terms_of(p, seq, h, token + i, key, mean_logit ? mean_logit[i] : 0.0);
    if (row.first > 0 || row.last < kKeys || !plain)
      body(i, row, std::true_type());
    else
      body(i, row, std::false_type());
  }
}

// x rounded to a quantized value times its scale; `inverse`: 1 / scale.
template <octet_dtype dtype>
OCTET_INLINE Vf rounded_on(Vf x, Vf scale, Vf inverse) {
  if constexpr (dtype == OCTET_E4M3) return round_e4m3(x * inverse) * scale;
  return ((x * inverse + 0x1.8p23f) - 0x1.8p23f) * scale;
}

// [rows][kKeys], one scale.
template <octet_dtype dtype>
inline void round_tile(float* x, int64_t rows) {
  const float largest = finite_amax(x, rows * kKeys);
  const Scale scale = scale_of(largest, largest_quantized(dtype));
  for (int64_t i = 0; i < rows * kKeys; i += kLanes)
    store(x + i, rounded_on<dtype>(load(x + i), splat(scale.scale), splat(scale.inverse)));
}

}  // namespace octet::cpu::OCTET_ISA
