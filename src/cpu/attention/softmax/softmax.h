// One row of one tile: logits, running maximum, probabilities, in registers.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "cpu/attention/pack/round.h"
#include "cpu/attention/pack/seen.h"
#include "cpu/attention/softmax/exp2.h"
#include "cpu/attention/softmax/softcap.h"
#include "cpu/gemm/matmul.h"

namespace octet::cpu::OCTET_ISA {

constexpr int kVectors = static_cast<int>(kKeys) / kLanes;  // per row of a tile

// The logits of a call are softcap(scale * q.k) - slope * distance + mask. These terms are those of one query.
struct LogitTerms {
  bool plain = true;       // nothing
  float softcap = 0.f;     // 0: none
  float mean_logit = 0.f;  // with a softcap: scale * q.mean, for the mean that was taken from k
  float slope = 0.f;       // of ALiBi; NaN where it is not finite; 0: none
  int diagonal = 0;        // the key at distance 0, from the first key of the tile on
  int nearest = 0;         // without a mask tensor: the distance whose term is the row bias
};

// The keys of the current tile, or of several, as one row needs them.
struct TileRow {
  const float* k_scale;       // null: 1
  const int32_t* correction;  // null: 0
  int first, last;            // visible keys
  const void* mask;           // this row of the mask tensor at the first key; null: none
  octet_dtype mask_dtype;
  int64_t mask_stride;
  float row_bias;  // subtracted from the mask and ALiBi: row_bias_of
  LogitTerms terms{};

  // Returns whether every key of the tile is visible and its logit is scale * q.k.
  bool whole() const { return terms.plain && first <= 0 && last >= kKeys; }

  // Returns the row of one tile, where this is a row of several.
  TileRow of_tile(int64_t tile) const {
    const int64_t key = tile * kKeys;
    TileRow t = *this;
    if (k_scale) t.k_scale += key;
    if (correction) t.correction += key;
    t.first = static_cast<int>(std::max<int64_t>(first - key, 0));
    t.last = static_cast<int>(std::min<int64_t>(last - key, kKeys));
    t.terms.diagonal -= static_cast<int>(key);
    if (mask) t.mask = static_cast<const char*>(mask) + key * mask_stride * mask_bytes(mask_dtype);
    return t;
  }
};

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;
constexpr float kMinusInfinity = -__builtin_inff();

// The sink of a head; -inf: none.
inline float sink_of(const Problem& p, int64_t b, int64_t h) {
  return p.sinks.present() ? *p.sinks.at<float>(b, h, 0) : kMinusInfinity;
}

// The slope of ALiBi of a head: 0 for none, NaN for one that is not finite.
inline float slope_of(const Problem& p, const Sequence& seq, int64_t h) {
  const float slope = p.alibi_slopes.present() ? *p.alibi_slopes.at<float>(seq.index, h, 0) : 0.f;
  return slope - slope == 0.f ? slope : __builtin_nanf("");
}

// The terms of query i. `key`: the first of the tile; `mean_logit`: q.mean, for the mean that was taken from k.
inline LogitTerms terms_of(const Problem& p, const Sequence& seq, int64_t h, int64_t i, int64_t key,
                           double mean_logit) {
  if (p.plain_logits()) return {};
  LogitTerms terms{.plain = false, .softcap = p.softcap};
  if (p.softcap != 0.f) terms.mean_logit = static_cast<float>(p.scale * mean_logit);
  if (!p.alibi_slopes.present()) return terms;
  terms.slope = slope_of(p, seq, h);
  terms.diagonal = static_cast<int>(i + seq.k_tokens - seq.q_tokens - key);
  const Problem::Distances distances =
      Problem::distances_of(i, seq.q_tokens, seq.k_tokens, p.keys_of(i, seq.q_tokens, seq.k_tokens));
  terms.nearest = static_cast<int>(terms.slope < 0.f ? distances.most : distances.least);
  return terms;
}

// Returns whether all queries of a head have one row of a mask tensor, and see the same keys of it.
inline bool one_mask_row(const Problem& p) { return !p.windowed && !p.mask.stride[2] && !p.alibi_slopes.present(); }

// Returns whether rows may have a row bias other than 0.
inline bool has_row_bias(const Problem& p) {
  return p.alibi_slopes.present() || (p.mask.present() && p.mask.dtype != OCTET_BOOL);
}

inline float mask_number(octet_dtype dtype, const void* mask, int64_t at) {
  switch (dtype) {
    case OCTET_BOOL:
      return static_cast<const uint8_t*>(mask)[at] ? 0.f : kMinusInfinity;
    case OCTET_F32:
      return static_cast<const float*>(mask)[at];
    case OCTET_F16:
      return from_f16(static_cast<const uint16_t*>(mask)[at]);
    default:
      return from_bf16(static_cast<const uint16_t*>(mask)[at]);
  }
}

// What ALiBi adds to the logit of a key at a distance.
inline double alibi(float slope, int64_t distance) {
  return -static_cast<double>(slope) * static_cast<double>(distance);
}

// The largest number that ALiBi, with a mask tensor or without, adds to a logit of query i of head h; 0 where a mask
// tensor makes it infinite.
inline float alibi_row_bias(const Problem& p, const Sequence& seq, int64_t h, int64_t i) {
  const LogitTerms terms = terms_of(p, seq, h, i, 0, 0.0);
  double top = alibi(terms.slope, terms.nearest);
  if (p.mask.present()) {
    const KeyRange keys = p.keys_of(i, seq.q_tokens, seq.k_tokens);
    const void* row = mask_row(p, seq.batch, h, i, 0);
    top = kMinusInfinity;
    for (int64_t j = keys.first; j < keys.last; ++j) {
      const double y =
          mask_number(p.mask.dtype, row, j * p.mask.stride[3]) + alibi(terms.slope, std::abs(terms.diagonal - j));
      top = std::max(top, y);
    }
  }
  return std::fabs(top) <= std::numeric_limits<float>::max() || !p.mask.present() ? static_cast<float>(top) : 0.f;
}

// The largest number that a mask tensor and ALiBi add to a logit of query i of head h. A number common to a row changes
// nothing but lse; a large one, like the lowest of a type in a row that is masked as a whole, would take the bits of
// the logits. So they go without it. 0 for bool masks and none.
inline float row_bias_of(const Problem& p, const Sequence& seq, int64_t h, int64_t i) {
  if (p.alibi_slopes.present()) return alibi_row_bias(p, seq, h, i);
  if (!p.mask.present() || p.mask.dtype == OCTET_BOOL) return 0.f;
  const KeyRange keys = p.keys_of(i, seq.q_tokens, seq.k_tokens);
  const void* row = mask_row(p, seq.batch, h, i, 0);
  const int64_t stride = p.mask.stride[3];
  Vf tops[4];
  for (Vf& top : tops) top = splat(kMinusInfinity);
  int64_t j = keys.first;
  const auto largest = [&](const auto* x, const auto& load_some, const auto& number) {
    for (; stride == 1 && j + 4 * kLanes <= keys.last; j += 4 * kLanes)
      for (int v = 0; v < 4; ++v) tops[v] = max(load_some(x + j + v * kLanes), tops[v]);
    for (; j < keys.last; ++j)
      if (const float y = number(x[j * stride]); y > tops[0][0]) tops[0][0] = y;
  };
  switch (p.mask.dtype) {
    case OCTET_F32:
      largest(
          static_cast<const float*>(row), [](const float* x) OCTET_INLINE_LAMBDA { return load(x); },
          [](float x) { return x; });
      break;
    case OCTET_F16:
      largest(
          static_cast<const uint16_t*>(row), [](const uint16_t* x) OCTET_INLINE_LAMBDA { return load_f16(x); },
          [](uint16_t x) { return from_f16(x); });
      break;
    default:
      largest(
          static_cast<const uint16_t*>(row), [](const uint16_t* x) OCTET_INLINE_LAMBDA { return load_bf16(x); },
          [](uint16_t x) { return from_bf16(x); });
      break;
  }
  const float top = reduce_max(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
  return __builtin_fabsf(top) < __builtin_inff() ? top : 0.f;
}

// A positive factor as a float: one below the normal numbers as a subnormal one, which flushing would make 0.
inline float kept_from_zero(double x) {
  if (!(x < 0x1p-126)) return static_cast<float>(x);
  const auto units = static_cast<uint32_t>(std::max(x * 0x1p149, 1.0));
  float y;
  std::memcpy(&y, &units, sizeof y);
  return y;
}

// Loads what a mask tensor, and ALiBi with it, add to the logits of one row: -inf, or a number minus the row bias.
inline void load_mask(const TileRow& row, float* out) {
  for (int j = row.first; j < row.last; ++j) {
    const float number = mask_number(row.mask_dtype, row.mask, j * row.mask_stride);
    if (row.terms.slope == 0.f)
      out[j] = number - row.row_bias;
    else if (number == kMinusInfinity)
      out[j] = number;
    else
      out[j] = static_cast<float>(number + alibi(row.terms.slope, std::abs(row.terms.diagonal - j)) - row.row_bias);
  }
}

// The cap of a row, and its derivative. Not inline: calls without a softcap keep their registers.
static inline __attribute__((noinline)) void cap_row(const LogitTerms& terms, Vf (&x)[kVectors],
                                                     Vf (&derivative)[kVectors]) {
  for (int v = 0; v < kVectors; ++v) {
    const Capped y = softcap(x[v] + terms.mean_logit, terms.softcap);
    x[v] = y.x, derivative[v] = y.derivative;
  }
}

// Turns scale * q.k into logits: capped, with ALiBi and mask, without the row bias. Of the logits by scale * q.k it
// leaves the derivative where that is not null.
OCTET_INLINE void add_terms(const TileRow& row, Vf (&x)[kVectors], Vf* derivative) {
  const LogitTerms& terms = row.terms;
  if (terms.softcap != 0.f) {
    Vf capped[kVectors], by_x[kVectors];
    for (int v = 0; v < kVectors; ++v) capped[v] = x[v];
    cap_row(terms, capped, by_x);
    for (int v = 0; v < kVectors; ++v) {
      x[v] = capped[v];
      if (derivative) derivative[v] = by_x[v];
    }
  }
  if (row.mask) {
    float mask[kKeys];
    load_mask(row, mask);
    for (int v = 0; v < kVectors; ++v) {
      const Vf added = load(mask + v * kLanes);
      x[v] = added == kMinusInfinity ? added : x[v] + added;
    }
  } else if (terms.slope != 0.f) {
    for (int v = 0; v < kVectors; ++v) {
      const Vi j = iota() + (v * kLanes - terms.diagonal);
      x[v] -= terms.slope * to_float((j < Vi{} ? -j : j) - terms.nearest);
    }
  }
}

// Loads the logits of a row before softmax_scale: x = sum * k_scale, and -inf for masked keys. Where they are not plain
// they are x = sum * k_scale * to_logit with add_terms, which the caller scales by 1; `derivative`: of add_terms.
template <bool partial, bool correct = false, class Sum>
OCTET_INLINE void load_logits(const Sum* s, const TileRow& row, float to_logit, Vf (&x)[kVectors],
                              Vf* derivative = nullptr) {
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (correct)
      x[v] = to_float(load(s + v * kLanes) + load(row.correction + v * kLanes));
    else
      x[v] = to_float(load(s + v * kLanes));
  }
  if (row.k_scale)
    for (int v = 0; v < kVectors; ++v) x[v] *= load(row.k_scale + v * kLanes);
  if constexpr (partial) {
    if (!row.terms.plain) {
      for (Vf& each : x) each *= to_logit;
      add_terms(row, x, derivative);
    }
    for (int v = 0; v < kVectors; ++v) {
      const Vi j = iota() + v * kLanes;
      x[v] = ((j >= row.first) & (j < row.last)) ? x[v] : splat(kMinusInfinity);
    }
  }
}

OCTET_INLINE float largest_of(const Vf (&x)[kVectors]) {
  Vf m = x[0];
  for (int v = 1; v < kVectors; ++v) m = max(x[v], m);
  return reduce_max(m);
}

template <int degree>
OCTET_INLINE float scalar_exp2(float x) {
  return exp2<degree>(splat(x))[0];
}

// Returns the degree of the polynomial for exp2, which makes it as precise as P is going to be.
constexpr int exp2_degree(PFormat format) {
  switch (format) {
    case PFormat::u8:
      return kExp2For8Bits;
    case PFormat::e4m3:  // a static scale: an error moves many p over the same boundary
    case PFormat::bf16:
    case PFormat::f16:
      return kExp2For16Bits;
    default:
      return kExp2For32Bits;
  }
}

// The maximum that a tile with the largest logit `top` proposes under bias correction beta (arXiv 2510.04212, Algorithm
// 1): where several logits equal the largest of the row so far, beta times it if positive, 0 if negative; at most
// `limit` above it, or the row would underflow. `earlier`: the largest logit of earlier tiles, so that it does not
// matter which tile a tie falls into.
inline float shifted_maximum(const float* x, int64_t keys, float top, float earlier, float beta, float limit) {
  const float largest = top > earlier ? top : earlier;
  const int64_t ties = std::count(x, x + keys, largest);
  if (!ties || ties + (earlier == largest) < 2 || top == 0.f || top == kMinusInfinity) return top;
  const float shifted = top > 0.f ? beta * top : 0.f;
  return shifted < top + limit ? shifted : top + limit;
}

// Returns whether P is stored times numerics.p_top; row sums are then, too.
constexpr bool scales_p(PFormat format) { return format == PFormat::e4m3 || format == PFormat::f16; }

// Stores a row of P, rounded to the format, as elements of the engine, and leaves the numbers stored in p.
template <class Pv, PFormat format>
OCTET_INLINE void store_p(Vf (&p)[kVectors], float top, typename Pv::Element* out) {
  if constexpr (std::is_same_v<typename Pv::Element, uint16_t> && format == PFormat::bf16) {
#ifdef __AVX512BF16__
    for (int v = 0; v < kVectors; v += 2) {
      const __m512i pair = (__m512i)_mm512_cvtne2ps_pbh(p[v + 1], p[v]);
      _mm512_storeu_si512(out + v * kLanes, pair);
      p[v] = (Vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(pair)), 16);
      p[v + 1] = (Vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(pair, 1)), 16);
    }
#endif
    return;
  }
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (format == PFormat::bf16) p[v] = round_bf16(p[v]);
    if constexpr (format == PFormat::f16) p[v] = round_f16(p[v] * top);
    if constexpr (format == PFormat::e4m3) p[v] = round_e4m3(p[v] * top);
    if constexpr (std::is_same_v<typename Pv::Element, float>) {
      store(out + v * kLanes, p[v]);
    } else {
#ifdef __AVX512BF16__
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + v * kLanes),
                          _mm512_cvtepi32_epi16((__m512i)(bits(p[v]) >> 16)));
#endif
    }
  }
}

// Does the same for callers that need only the sum of the numbers stored.
template <class Pv, PFormat format>
OCTET_INLINE Vf store_p_and_add(Vf (&p)[kVectors], float top, typename Pv::Element* out) {
#ifdef __AVX512BF16__
  if constexpr (std::is_same_v<typename Pv::Element, uint16_t> && format == PFormat::bf16) {
    const __m512bh ones = (__m512bh)splat(0x3f803f80);
    Vf sum{};
    for (int v = 0; v < kVectors; v += 2) {
      const __m512bh pair = _mm512_cvtne2ps_pbh(p[v + 1], p[v]);
      _mm512_storeu_si512(out + v * kLanes, (__m512i)pair);
      sum = _mm512_dpbf16_ps(sum, pair, ones);
    }
    return sum;
  }
#endif
  store_p<Pv, format>(p, top, out);
  return add_up(p);
}

// Multiplies a stored row of P by a power of two.
template <class Pv>
OCTET_INLINE void scale_p(typename Pv::Element* p, float unit) {
  for (int64_t j = 0; j < kKeys; ++j) {
    if constexpr (std::is_same_v<typename Pv::Element, float>)
      p[j] *= unit;
    else
      p[j] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, from_bf16(p[j]) * unit) >> 16);
  }
}

// Rounds a row of numbers in [0, 255] to whole ones and stores them as elements of the 8-bit engine.
template <class Pv>
OCTET_INLINE void store_u8(const Vf (&p)[kVectors], typename Pv::Element* out) {
  if constexpr (std::is_same_v<typename Pv::Element, float>) {
    for (int v = 0; v < kVectors; ++v) store(out + v * kLanes, (p[v] + splat(0x1.8p23f)) - splat(0x1.8p23f));
  } else {
#ifdef __AVX512F__
    // The packs interleave the 128-bit lanes of their operands; the permutation puts the words back in order.
    const auto whole = [&](int v) { return _mm512_cvtps_epi32(p[v]); };
    const __m512i bytes =
        _mm512_packus_epi16(_mm512_packs_epi32(whole(0), whole(1)), _mm512_packs_epi32(whole(2), whole(3)));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, bytes));
#endif
  }
}

}  // namespace octet::cpu::OCTET_ISA
