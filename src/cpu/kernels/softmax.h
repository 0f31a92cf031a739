// One row of one tile: logits, running maximum, probabilities, in registers.
#pragma once
#include "cpu/kernels/pack.h"

namespace octet::cpu::OCTET_ISA {

constexpr int kVectors = static_cast<int>(kKeys) / kLanes;  // per row of a tile

// The keys of the current tile, as one row needs them.
struct TileRow {
  const float* k_scale;         // null: 1
  const int32_t* correction;    // null: 0
  int first, last;              // visible keys of the tile
  const void* mask;             // this row of the mask tensor at the tile's first key; null: none
  octet_dtype mask_dtype;
  int64_t mask_stride;
};

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;
constexpr float kMinusInfinity = -__builtin_inff();

// Row i of the mask tensor at `key`.
OCTET_INLINE const void* mask_row(const Problem& p, int64_t b, int64_t h, int64_t i, int64_t key) {
  const int64_t bytes = p.mask.dtype == OCTET_BOOL ? 1 : p.mask.dtype == OCTET_F32 ? 4 : 2;
  return static_cast<const char*>(p.mask.data) + p.mask.offset(b, h, i, key) * bytes;
}

// What a mask tensor adds to the logits of one row: 0 or -inf for bool, the numbers themselves else.
inline void load_mask(const TileRow& row, float* out) {
  for (int j = row.first; j < row.last; ++j) {
    const int64_t at = j * row.mask_stride;
    switch (row.mask_dtype) {
      case OCTET_BOOL: out[j] = static_cast<const uint8_t*>(row.mask)[at] ? 0.f : kMinusInfinity; break;
      case OCTET_F32: out[j] = static_cast<const float*>(row.mask)[at]; break;
      case OCTET_F16: out[j] = from_f16(static_cast<const uint16_t*>(row.mask)[at]); break;
      default: out[j] = from_bf16(static_cast<const uint16_t*>(row.mask)[at]); break;
    }
  }
}

// Logits of a row in units of 1 / unit: x = sum * k_scale, invisible keys -inf. With a mask tensor x = sum * k_scale *
// to_logit + mask, and the caller's unit is 1.
template <bool partial, class Sum>
OCTET_INLINE void load_logits(const Sum* s, const TileRow& row, float to_logit, Vf (&x)[kVectors]) {
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (std::is_same_v<Sum, int32_t>) x[v] = to_float(load(s + v * kLanes) + load(row.correction + v * kLanes));
    else x[v] = load(s + v * kLanes);
  }
  if (row.k_scale)
    for (int v = 0; v < kVectors; ++v) x[v] *= load(row.k_scale + v * kLanes);
  if constexpr (partial) {
    if (row.mask) {
      float mask[kKeys];
      load_mask(row, mask);
      for (int v = 0; v < kVectors; ++v) {
        const Vf added = load(mask + v * kLanes);
        x[v] = added == kMinusInfinity ? added : x[v] * to_logit + added;
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const Vi j = iota() + v * kLanes;
      x[v] = (j >= row.first) & (j < row.last) ? x[v] : splat(kMinusInfinity);
    }
  }
}

OCTET_INLINE float largest_of(const Vf (&x)[kVectors]) {
  Vf m = x[0];
  for (int v = 1; v < kVectors; ++v) m = max(x[v], m);
  return reduce_max(m);
}

OCTET_INLINE float scalar_exp2(float x) { return exp2(splat(x))[0]; }

// The shifted maximum of arXiv 2510.04212, Algorithm 1: where several logits of a tile equal a positive maximum, use
// beta times it; a tied negative maximum becomes 0. Clamped to 20 above, or the row would underflow.
inline float shifted_maximum(const Vf (&x)[kVectors], float m, float beta, float to_logit) {
  int ties = 0;
  for (int v = 0; v < kVectors; ++v)
    for (int i = 0; i < kLanes; ++i) ties += x[v][i] == m;
  if (ties < 2 || m == 0.f) return m;
  if (m < 0.f) return m * to_logit < -20.f ? m + 20.f / to_logit : 0.f;
  const float shifted = beta * m, limit = m + 20.f / to_logit;
  return shifted < limit ? shifted : limit;
}

// Stores P of a row in the engine's elements and returns the numbers stored.
template <class Pv, PFormat format>
OCTET_INLINE Vf store_p(Vf p, float top, typename Pv::Element* out) {
  if constexpr (format == PFormat::bf16) p = round_bf16(p);
  if constexpr (format == PFormat::f16) p = round_f16(p);
  if constexpr (format == PFormat::e4m3) p = round_e4m3(p * top);
  if constexpr (std::is_same_v<typename Pv::Element, float>) {
    store(out, p);
  } else {
#ifdef __AVX512F__
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16((__m512i)(bits(p) >> 16)));
#endif
  }
  return p;
}

// Whole numbers in [0, 255] as elements of the 8-bit engine.
template <class Pv>
OCTET_INLINE void store_u8(Vf p, typename Pv::Element* out) {
  if constexpr (std::is_same_v<typename Pv::Element, float>) {
    store(out, (p + splat(0x1.8p23f)) - splat(0x1.8p23f));
  } else {
#ifdef __AVX512F__
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(p)));
#endif
  }
}

}  // namespace octet::cpu::OCTET_ISA
