// The softmax of the forward pass: one row of a step, from logits to P.
#pragma once
#include "cpu/attention/softmax/softmax.h"

namespace octet::cpu::OCTET_ISA {

constexpr int64_t kStepTiles = kMaxStepKeys / kKeys;

// Softmax state of the rows of a block.
template <int64_t rows>
struct alignas(64) RowState {
  float l[rows][kLanes];  // partial sums
  float m[rows];
  float top[rows];                  // bias correction beta: largest logit so far; m may lie above it
  float softmax_scale_log2[rows];   // log2(e) times what turns x into a logit
  float to_logit[rows];             // logit per unit of sum * k_scale
  float row_bias[rows];             // row_bias_of: what logits lack
  float alpha[rows];                // of this step
  float p_scale[rows][kStepTiles];  // 8-bit P, of each tile: o += p_scale * product
  float unit;                       // P, its factor left out, is summed times this power of two: unit_of_p
};

// Whether P meets v itself, not what is left of v when scales are taken out.
constexpr bool sums_in_units(PFormat format) { return format != PFormat::u8 && format != PFormat::e4m3; }

// P is at most 1 and there are fewer than 2^31 keys, so that sums of P v in this unit are floats whatever v is.
// `factor`: of P, as it is rounded.
constexpr float unit_of_p(bool v_finite, float factor) { return v_finite ? 1.f : 0x1p-32f / factor; }

OCTET_INLINE void scale_row(float* o, float alpha, int64_t columns) {
  for (int64_t c = 0; c < columns; c += kLanes) store(o + c, load(o + c) * alpha);
}

// One row of a step: its logits in the place of the sums; returns the largest.
template <class Qk>
OCTET_INLINE float logits_row(typename Qk::Sum* s, const TileRow& row, int64_t tiles, float to_logit) {
  Vf tops[kVectors];
  for (Vf& top : tops) top = splat(kMinusInfinity);
  for (int64_t tile = 0; tile < tiles; ++tile, s += kKeys) {
    const TileRow own = row.of_tile(tile);
    Vf x[kVectors];
    if (own.whole())
      load_logits<false, kBias<Qk> != 0>(s, own, to_logit, x);
    else
      load_logits<true, kBias<Qk> != 0>(s, own, to_logit, x);
    for (int v = 0; v < kVectors; ++v) {
      tops[v] = max(x[v], tops[v]);
      store(reinterpret_cast<float*>(s) + v * kLanes, x[v]);
    }
  }
  return largest_of(tops);
}

// The largest logit of a row of a step.
template <class Qk>
OCTET_INLINE float largest_logit(const typename Qk::Sum* s, const TileRow& row, int64_t tiles, float to_logit) {
  Vf tops[kVectors];
  for (Vf& top : tops) top = splat(kMinusInfinity);
  for (int64_t tile = 0; tile < tiles; ++tile, s += kKeys) {
    const TileRow own = row.of_tile(tile);
    Vf x[kVectors];
    if (own.whole())
      load_logits<false, kBias<Qk> != 0>(s, own, to_logit, x);
    else
      load_logits<true, kBias<Qk> != 0>(s, own, to_logit, x);
    for (int v = 0; v < kVectors; ++v) tops[v] = max(x[v], tops[v]);
  }
  return largest_of(tops);
}

// Updates the maxima of kLanes rows from `first` on with those of a step, and finds the rescale factors alpha.
template <int degree, int64_t rows>
OCTET_INLINE void update_max(const float (&tops)[kLanes], int64_t first, RowState<rows>& state) {
  const Vf old = load(state.m + first), m = max(load(tops), old);
  const Vf base = m == kMinusInfinity ? Vf{} : m;
  store(state.m + first, m);
  store(state.alpha + first, exp2<degree>((old - base) * load(state.softmax_scale_log2 + first)));
}

// Quantizes a row of 8-bit P: the largest of each tile, in tops, becomes `top`. Writes the scale of each tile.
template <class Pv>
OCTET_INLINE void quantize_p(const float* p, int64_t tiles, Quad tops, float top, typename Pv::Element* out,
                             float* scales) {
  constexpr float kNothing = 0x1p-110f;  // adds nothing beside the row's largest, and its inverse may overflow
  const auto counts = tops > kNothing;
  const Quad inverses = counts ? top / tops : Quad{}, scaled = counts ? tops * (1.f / top) : Quad{};
  std::memcpy(scales, &scaled, sizeof scaled);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    Vf x[kVectors];
    for (int v = 0; v < kVectors; ++v) x[v] = load(p + tile * kKeys + v * kLanes) * inverses[tile];
    store_u8<Pv>(x, out + tile * kKeys);
  }
}

// One row of a step: from logits to P.
template <class Pv, PFormat format, int64_t rows>
OCTET_INLINE void p_of_row(const ForwardNumerics& numerics, float* logits, int64_t tiles, const float* v_scale,
                           bool v_finite, int64_t i, RowState<rows>& state, typename Pv::Element* p_out) {
  constexpr int degree = exp2_degree(format);
  const float scale_log2 = state.softmax_scale_log2[i], base = state.m[i] == kMinusInfinity ? 0.f : state.m[i];
  Vf l{}, tops[kStepTiles] = {}, poisons[kStepTiles] = {};
  for (int64_t tile = 0; tile < tiles; ++tile) {
    float* const own = logits + tile * kKeys;
    Vf p[kVectors];
    for (int v = 0; v < kVectors; ++v) p[v] = exp2<degree>((load(own + v * kLanes) - base) * scale_log2);
    if constexpr (format == PFormat::u8) {
      l += add_up(p);
      Vf top{}, poison{};
      for (int v = 0; v < kVectors; ++v) {
        const Vf scaled_p = p[v] == Vf{} ? p[v] : p[v] * load(v_scale + tile * kKeys + v * kLanes);
        top = max(scaled_p, top);
        poison += scaled_p * 0.f;
        store(own + v * kLanes, scaled_p);
      }
      tops[tile] = top;
      poisons[tile] = poison;
    } else {
      Vf exact{};
      if (!numerics.l_from_p) exact = add_up(p) * (scales_p(format) ? numerics.p_top : 1.f);
      Vf rounded = store_p_and_add<Pv, format>(p, numerics.p_top, p_out + tile * kKeys);
      if (state.unit != 1.f) {
        scale_p<Pv>(p_out + tile * kKeys, state.unit);
        exact *= state.unit, rounded *= state.unit;
      }
      l += numerics.l_from_p ? rounded : exact;
    }
  }
  if constexpr (format == PFormat::u8) {
    quantize_p<Pv>(logits, tiles, reduce_max(tops), numerics.p_top, p_out, state.p_scale[i]);
    if (!v_finite)
      for (int64_t tile = 0; tile < tiles; ++tile) state.p_scale[i][tile] += reduce_add(poisons[tile]);
  }
  store(state.l[i], load(state.l[i]) * state.alpha[i] + l);
}

// Returns whether P may be larger than 1: it is a float, a bfloat, or has a scale of its own in every part. The maximum
// then only has to keep p times v in the range of floats, so the stale one of earlier steps mostly does.
constexpr bool may_keep_stale_max(PFormat format) {
  return format == PFormat::exact || format == PFormat::bf16 || format == PFormat::u8;
}

// Logits and P at once for a step that all of the row sees, with the maximum of earlier steps. Returns false, with
// nothing changed, if that is too small.
template <class Qk, class Pv, PFormat format, int64_t rows>
OCTET_INLINE bool p_of_row_stale_max(const ForwardNumerics& numerics, const typename Qk::Sum* s, const TileRow& row,
                                     int64_t tiles, const float* v_scale, int64_t i, RowState<rows>& state,
                                     typename Pv::Element* p_out) {
  constexpr float kRange = format == PFormat::u8 ? 0x1p60f : 0x1p10f;  // 8-bit P has the scale of v in it
  const float scale_log2 = state.softmax_scale_log2[i], base = state.m[i], shift = base * scale_log2;
  alignas(64) float scaled_p[kMaxStepKeys];
  alignas(64) typename Pv::Element rounded[kMaxStepKeys];
  Vf l{}, tops[kStepTiles] = {};
  for (int64_t tile = 0; tile < tiles; ++tile) {
    Vf p[kVectors];
    load_logits<false, kBias<Qk> != 0>(s + tile * kKeys, row.of_tile(tile), 1.f, p);
    for (int v = 0; v < kVectors; ++v) {
      const Vf x = format == PFormat::exact ? (p[v] - base) * scale_log2 : p[v] * scale_log2 - shift;
      p[v] = exp2<exp2_degree(format)>(x);
    }
    if constexpr (format == PFormat::u8) {
      l += add_up(p);
      Vf top{};
      for (int v = 0; v < kVectors; ++v) {
        const Vf y = p[v] * load(v_scale + tile * kKeys + v * kLanes);
        top = max(y, top);
        store(scaled_p + tile * kKeys + v * kLanes, y);
      }
      tops[tile] = top;
    } else {
      l += store_p_and_add<Pv, format>(p, 1.f, rounded + tile * kKeys);
    }
  }
  if (!reduce_is_below(l, kRange)) return false;
  if constexpr (format == PFormat::u8) {
    const Vf all = max(max(tops[0], tops[1]), max(tops[2], tops[3]));
    if (!reduce_is_below(all, kRange)) return false;
    quantize_p<Pv>(scaled_p, tiles, reduce_max(tops), numerics.p_top, p_out, state.p_scale[i]);
  } else {
    std::memcpy(p_out, rounded, sizeof *rounded * static_cast<std::size_t>(tiles * kKeys));
  }
  store(state.l[i], load(state.l[i]) + l);
  return true;
}

}  // namespace octet::cpu::OCTET_ISA
