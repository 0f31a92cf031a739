// The softmax of 8-bit P in f16 arithmetic, 32 keys at a time, for instruction sets that have it: 8 bits need no more,
// and P of a step stays in registers until their scales are known. Rows that f16 does not hold are
// left to rows.h.
#pragma once
#include "cpu/attention/fwd/rows.h"

#ifdef __AVX512FP16__

namespace octet::cpu::OCTET_ISA {

constexpr int kF16Lanes = 32;
constexpr int64_t kF16Vectors = kMaxStepKeys / kF16Lanes;

// P = 1 is 2^11: there are 24 octaves down to where P fades to 0, and some four up, by which logits may exceed the
// maximum of earlier steps.
constexpr int kOneInF16 = 11;
constexpr float kFromF16 = 1.f / (1 << kOneInF16);

// The scales and the poisoned keys that all rows of a step share.
struct F16Step {
  __m512h v_scale[kF16Vectors];   // divided by v_range, 0 where not finite, in packed order
  __mmask32 poison[kF16Vectors];  // keys with a scale that is not finite, in packed order
  float v_range, k_top;           // at least the largest scale
  bool even;                      // no scale but 0 is so small beside the largest that it would lose bits
};

// Returns the order of 32 keys that _mm512_packus_epi32 leaves: it packs the quarters of two vectors alternately.
inline __m512i packed_order() {
  return _mm512_set_epi16(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8, 23, 22, 21, 20, 7, 6, 5, 4, 19,
                          18, 17, 16, 3, 2, 1, 0);
}

// Returns which of them lie in [first, last).
OCTET_INLINE __mmask32 seen_of_packed(int64_t first, int64_t last) {
  const auto bound = [](int64_t j) OCTET_INLINE_LAMBDA {
    return _mm512_set1_epi16(static_cast<int16_t>(std::clamp<int64_t>(j, 0, kF16Lanes)));
  };
  return _mm512_cmpge_epi16_mask(packed_order(), bound(first)) & _mm512_cmplt_epi16_mask(packed_order(), bound(last));
}

OCTET_INLINE __m512h pack_f16(Vf low, Vf high) {
  const __m512i both =
      _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)_mm512_cvtxps_ph(low)), (__m256i)_mm512_cvtxps_ph(high), 1);
  return (__m512h)_mm512_permutexvar_epi16(packed_order(), both);
}

inline F16Step f16_step(const float* k_scale, const float* v_scale, int64_t tiles) {
  F16Step step;
  const auto finite = [](Vf x) OCTET_INLINE_LAMBDA { return x * 0.f == Vf{} ? x : Vf{}; };
  Vf v_top = splat(0x1p-120f), v_low = splat(0x1p126f), k_top{};
  for (int64_t j = 0; j < tiles * kKeys; j += kLanes) {
    const Vf v = finite(load(v_scale + j));
    v_top = max(v, v_top);
    v_low = min(v > Vf{} ? v : splat(0x1p126f), v_low);
    k_top = max(floats(bits(finite(load(k_scale + j))) & 0x7fffffff), k_top);
  }
  step.k_top = reduce_max(k_top);
  step.even = reduce_max(v_top) <= -reduce_max(-v_low) * 0x1p12f;
  // A power of two, so that keys that a row does not see leave it its bits.
  const int exponent = std::min(__builtin_ilogbf(reduce_max(v_top)), 125);
  step.v_range = __builtin_ldexpf(1.f, exponent + 1);
  const float inverse = __builtin_ldexpf(1.f, -exponent - 1);
  for (int64_t v = 0; v < tiles * kKeys / kF16Lanes; ++v) {
    Vf scale[2], poison[2];
    for (int half = 0; half < 2; ++half) {
      const int64_t j = v * kF16Lanes + half * kLanes;
      const Vf both = (load(v_scale + j) * 0.f) + (load(k_scale + j) * 0.f);
      scale[half] = finite(load(v_scale + j)) * inverse;
      poison[half] = both == Vf{} ? Vf{} : splat(1.f);
    }
    step.v_scale[v] = pack_f16(scale[0], scale[1]);
    step.poison[v] = _mm512_cmp_ph_mask(pack_f16(poison[0], poison[1]), __m512h{}, _CMP_NEQ_OQ);
  }
  return step;
}

// 2^(bits / 1024 - 14), exactly where that is a power of two and 1e-3 off at most, rounding included; 0 for 0. With
// n + f = bits / 1024 - 15, the bits read as f16 are 2^n (1 + f), and 2^(1 + f) is 1 + (1 + f) q(1 + f) with q
// quadratic.
OCTET_INLINE __m512h exp2_of_bits(__m512i bits) {
  const auto half = [](float x) OCTET_INLINE_LAMBDA { return _mm512_set1_ph(static_cast<_Float16>(x)); };
  const __m512i fraction = _mm512_set1_epi16(0x3ff);
  const __m512h m = (__m512h)_mm512_ternarylogic_epi32(bits, fraction, _mm512_set1_epi16(0x3c00), 0xea);
  __m512h q = _mm512_fmadd_ph(half(0.1239013671875f), m, half(0.1259765625f));
  q = _mm512_fmadd_ph(q, m, half(0.7509765625f));
  return _mm512_fmadd_ph(q, (__m512h)bits, (__m512h)_mm512_andnot_si512(fraction, bits));
}

OCTET_INLINE __m512i larger(__m512i a, __m512i b) { return (__m512i)_mm512_max_ph((__m512h)a, (__m512h)b); }

// The larger numbers of four vectors side by side, a group of four for each quad of lanes.
OCTET_INLINE __m512i merge_tops(const __m512i (&x)[kStepTiles]) {
  const __m512i ab = larger(_mm512_unpacklo_epi16(x[0], x[1]), _mm512_unpackhi_epi16(x[0], x[1]));
  const __m512i cd = larger(_mm512_unpacklo_epi16(x[2], x[3]), _mm512_unpackhi_epi16(x[2], x[3]));
  return larger(_mm512_unpacklo_epi32(ab, cd), _mm512_unpackhi_epi32(ab, cd));
}

// The largest groups of eight such vectors, one after the other.
OCTET_INLINE __m512h largest_groups(const __m512i* x) {
  const auto pair = [](__m512i a, __m512i b) OCTET_INLINE_LAMBDA {
    return larger(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  };
  const auto quarters = [](__m512i a, __m512i b) OCTET_INLINE_LAMBDA {
    return larger(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xdd));
  };
  return (__m512h)quarters(quarters(pair(x[0], x[1]), pair(x[2], x[3])), quarters(pair(x[4], x[5]), pair(x[6], x[7])));
}

// Scratch memory of a group of kLanes rows.
struct F16Rows {
  __m512h p[kLanes][kF16Vectors];  // P times the scales of v
  __m512i tops[kLanes];
  alignas(64) uint16_t inverse[kLanes][kStepTiles];
};

// One row from logits to P, and its l. Returns false, with l unchanged, if f16 does not hold them.
template <bool partial, int64_t rows>
OCTET_INLINE bool p_of_row_f16(const F16Step& step, const int32_t* s, const TileRow& row, int64_t tiles, int64_t i,
                               RowState<rows>& state, __m512h* p, __m512i& top) {
  constexpr float kOctave = 1024.f;
  const float scale_log2 = state.softmax_scale_log2[i] * kOctave,
              shift = (kOneInF16 + 14) * kOctave - state.m[i] * scale_log2;
  // Sums stay below 2^22: no P is beyond the integers, and none is NaN.
  if (!(step.k_top * scale_log2 < 0x1p8f && __builtin_fabsf(shift) < 0x1p30f)) return false;
  __m512h l{};
  __m512i tops[kStepTiles] = {}, all_bits{};
  __mmask32 poison = 0;
#pragma GCC unroll 4
  for (int64_t tile = 0; tile < kStepTiles; ++tile) {
    if (tile == tiles) break;
    for (int64_t v = 2 * tile; v < 2 * tile + 2; ++v) {
      const int64_t j = v * kF16Lanes;
      const Vf low = to_float(load(s + j)) * load(row.k_scale + j),
               high = to_float(load(s + j + kLanes)) * load(row.k_scale + j + kLanes);
      // P far below the maximum saturates at 0.
      __m512i bits = _mm512_packus_epi32(_mm512_cvtps_epi32(low * scale_log2 + shift),
                                         _mm512_cvtps_epi32(high * scale_log2 + shift));
      const __mmask32 seen = partial ? seen_of_packed(row.first - j, row.last - j) : ~__mmask32{};
      if constexpr (partial) bits = _mm512_maskz_mov_epi16(seen, bits);
      poison |= seen & step.poison[v];
      all_bits |= bits;
      const __m512h x = exp2_of_bits(bits);
      l += x;
      p[v] = x * step.v_scale[v];
      tops[tile] = v % 2 ? larger(tops[tile], (__m512i)p[v]) : (__m512i)p[v];
    }
  }
  top = merge_tops(tops);
  const Vf sum = (Vf)_mm512_cvtxph_ps(_mm512_castph512_ph256(l)) +
                 (Vf)_mm512_cvtxph_ps((__m256h)_mm512_extracti64x4_epi64((__m512i)l, 1));
  // Bits from 0x7c00 on are no number, from 0x8000 on they have a sign.
  if (poison || _mm512_movepi16_mask(all_bits) || !reduce_is_below(sum, __builtin_inff())) return false;
  store(state.l[i], load(state.l[i]) + sum * kFromF16);
  return true;
}

// The scales of P of kLanes rows, and their inverses.
template <int64_t rows>
OCTET_INLINE void scale_f16(float p_top, float v_range, int64_t first, RowState<rows>& state, F16Rows& group) {
  for (int row = 0; row < kLanes; row += 8) {
    const __m512i largest = (__m512i)largest_groups(group.tops + row);
    const __m256i four_rows[] = {_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1)};
    for (int half = 0; half < 2; ++half) {
      // At most 2^15, within f16: so small a part of P adds nothing beside the row's largest.
      const __m256h inverse =
          _mm512_cvtxps_ph(min(splat(0x1p15f), p_top / (Vf)_mm512_cvtxph_ps((__m256h)four_rows[half])));
      _mm256_store_si256(reinterpret_cast<__m256i*>(group.inverse[row + 4 * half]), (__m256i)inverse);
      store(state.p_scale[first + row + 4 * half], v_range * kFromF16 / (Vf)_mm512_cvtxph_ps(inverse));
    }
  }
}

// The quantized values of a row.
OCTET_INLINE void quantize_f16(const __m512h* p, const uint16_t* inverse, int64_t tiles, uint8_t* out) {
  // Undoes packed_order; even bytes are the first 32 keys of a tile, odd ones the others.
  const __m512i order =
      _mm512_set_epi8(63, 61, 59, 57, 47, 45, 43, 41, 31, 29, 27, 25, 15, 13, 11, 9, 55, 53, 51, 49, 39, 37, 35, 33, 23,
                      21, 19, 17, 7, 5, 3, 1, 62, 60, 58, 56, 46, 44, 42, 40, 30, 28, 26, 24, 14, 12, 10, 8, 54, 52, 50,
                      48, 38, 36, 34, 32, 22, 20, 18, 16, 6, 4, 2, 0);
  const __m512h magic = _mm512_set1_ph(1024);  // from where on the last bit is 1
#pragma GCC unroll 4
  for (int64_t tile = 0; tile < kStepTiles; ++tile) {
    if (tile == tiles) break;
    const __m512h scale = (__m512h)_mm512_set1_epi16(static_cast<int16_t>(inverse[tile]));
    const __m512i even = (__m512i)_mm512_fmadd_ph(p[2 * tile], scale, magic),
                  odd = (__m512i)_mm512_fmadd_ph(p[2 * tile + 1], scale, magic);
    const __m512i bytes = _mm512_ternarylogic_epi32(even, _mm512_slli_epi16(odd, 8), _mm512_set1_epi16(0xff), 0xe4);
    _mm512_storeu_si512(out + tile * kKeys, _mm512_permutexvar_epi8(order, bytes));
  }
}

// Rows [first, last), at most kLanes, from logits to P: s and p are those of the first. `row_at` gives a row's keys;
// all_seen: it sees them all. Sets done where that went well.
template <class Qk, int64_t rows, class RowAt>
inline void softmax_f16(const F16Step& step, const int32_t* s, int64_t stride, RowAt&& row_at, bool all_seen,
                        int64_t tiles, float p_top, int64_t first, int64_t last, RowState<rows>& state, uint8_t* p,
                        bool (&done)[kLanes]) {
  // P above 1 could take its sum with v out of range; a row that does not see the largest v needs the others.
  if (step.v_range > 0x1p93f || !step.even) return;
  // Only a row's first step asks for its maximum.
  alignas(64) float tops[kLanes];
  store(tops, splat(kMinusInfinity));
  bool fresh = false;
  for (int64_t i = first; i < last; ++i)
    if (state.m[i] == kMinusInfinity) {
      fresh = true;
      tops[i - first] = largest_logit<Qk>(s + (i - first) * stride, row_at(i), tiles, state.to_logit[i]);
    }
  if (fresh) update_max<kExp2For8Bits>(tops, first, state);
  F16Rows group;
  for (int64_t i = first; i < last; ++i) {
    const int64_t r = i - first;
    done[r] = all_seen
                  ? p_of_row_f16<false>(step, s + r * stride, row_at(i), tiles, i, state, group.p[r], group.tops[r])
                  : p_of_row_f16<true>(step, s + r * stride, row_at(i), tiles, i, state, group.p[r], group.tops[r]);
  }
  scale_f16(p_top, step.v_range, first, state, group);
  for (int64_t r = 0; r < last - first; ++r)
    if (done[r]) quantize_f16(group.p[r], group.inverse[r], tiles, p + r * kMaxStepKeys);
}

}  // namespace octet::cpu::OCTET_ISA

#endif
