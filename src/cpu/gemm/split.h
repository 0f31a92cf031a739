// Products of float32 numbers by the tile instructions of bf16.
//
// x = x1 + x2 + x3 with bf16 parts of 8 bits each, exact: every part is what the ones before it leave, rounded. Of the
// nine products of parts of x y, six reach float32: x1 y1, x1 y2, x2 y1, x2 y2, x1 y3, x3 y1; the other three stay
// below 2^-25 of it. A tile unit forms sixteen times as many products a cycle as vectors do. Numbers that bf16 rounds
// to infinity count as NaN; parts below 2^-126 are zero.
#pragma once
#include "cpu/gemm/matmul.h"

namespace octet::cpu::OCTET_ISA {

#ifdef __AMX_BF16__

// f32 x f32 -> f32 in tiles. A: [rows][part][words of two], B: [panel][part][words of two][columns of a panel].
struct Split : F32 {
  static constexpr bool kTiles = true;
};
constexpr int64_t kParts = 3;

// Words of one part of so many numbers.
constexpr int64_t part_words(int64_t elements) { return (elements + 31) / 32 * 16; }
template <>
constexpr int64_t words_of<Split>(int64_t elements) {
  return kParts * part_words(elements);
}
template <>
constexpr int64_t padded<Split>(int64_t elements) {
  return 2 * part_words(elements);
}

// n numbers to a row of A, its parts `part` words apart; n is a multiple of 32.
inline void split_row(const float* x, int64_t n, int64_t part, Word* out) {
  for (int64_t c = 0; c < n; c += 2 * kLanes, out += kLanes) {
    Vf low = load(x + c), high = load(x + c + kLanes);
    for (int64_t i = 0; i < kParts; ++i) {
      const auto pair = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
      store(reinterpret_cast<int32_t*>(out + i * part), (Vi)pair);
      low -= floats((Vi)_mm512_cvtepu16_epi32(_mm512_castsi512_si256(pair)) << 16);
      high -= floats((Vi)_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(pair, 1)) << 16);
    }
  }
}

// Columns of B that lie together: what the inner loop goes through many times is contiguous.
constexpr int64_t kSplitPanel = 32;

// The nearest bf16, as an integer.
OCTET_INLINE Vi nearest_bf16(Vf x) { return (Vi)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)); }

// [rows][columns] numbers to B, as if zeros followed up to `count` rows and whole tiles.
inline void split_columns(const float* x, int64_t rows, int64_t count, int64_t columns, Word* out) {
  const int64_t words = part_words(count);
  for (int64_t panel = 0; panel < columns; panel += kSplitPanel) {
    const int64_t width = std::min(kSplitPanel, columns - panel);
    for (int64_t w = 0; w < words; ++w)
      for (int64_t c = 0; c < width; c += kLanes) {
        const float* at = x + 2 * w * columns + panel + c;
        Vf even = 2 * w < rows ? load(at) : Vf{}, odd = 2 * w + 1 < rows ? load(at + columns) : Vf{};
        for (int64_t i = 0; i < kParts; ++i) {
          const Vi low = nearest_bf16(even), high = nearest_bf16(odd) << 16;
          store(reinterpret_cast<int32_t*>(out + (i * words + w) * width + c), low | high);
          even -= floats(low << 16);
          odd -= floats(high);
        }
      }
    out += kParts * words * width;
  }
}

// The layout of the operands of a product, in words: rows of A of `pieces` that each have three parts of `words`, and
// pieces of B.
struct SplitShape {
  int64_t words, a_row, a_part;
  int64_t pieces = 1, a_piece = 0, b_piece = 0;
};

template <int part>
OCTET_INLINE void load_a(const Word* a, const SplitShape& x, bool two) {
  _tile_loadd(4, a + part * x.a_part, x.a_row * 4);
  if (two) _tile_loadd(5, a + 16 * x.a_row + part * x.a_part, x.a_row * 4);
}
template <int part>
OCTET_INLINE void load_b(const Word* b, const SplitShape& x, bool two) {
  const int64_t width = two ? 32 : 16;
  _tile_loadd(6, b + part * x.words * width, width * 4);
  if (two) _tile_loadd(7, b + part * x.words * width + 16, width * 4);
}

// 16 or 32 rows by 16 or 32 columns of C.
template <bool accumulate, bool two_rows, bool two_columns>
inline void split_block(const SplitShape& x, const Word* a, const Word* b, float* c, int64_t ldc) {
  const int64_t c_bytes = ldc * 4;
  if constexpr (accumulate) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (two_columns) _tile_loadd(1, c + 16, c_bytes);
    if constexpr (two_rows) _tile_loadd(2, c + 16 * ldc, c_bytes);
    if constexpr (two_rows && two_columns) _tile_loadd(3, c + 16 * ldc + 16, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const auto multiply = [] OCTET_INLINE_LAMBDA {
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (two_columns) _tile_dpbf16ps(1, 4, 7);
    if constexpr (two_rows) _tile_dpbf16ps(2, 5, 6);
    if constexpr (two_rows && two_columns) _tile_dpbf16ps(3, 5, 7);
  };
  for (int64_t piece = 0; piece < x.pieces; ++piece)
    for (int64_t w = 0; w < x.words; w += 16) {
      const Word *aw = a + piece * x.a_piece + w, *bw = b + piece * x.b_piece + w * (two_columns ? 32 : 16);
      load_b<0>(bw, x, two_columns), load_a<2>(aw, x, two_rows), multiply();
      load_a<1>(aw, x, two_rows), multiply();
      load_b<1>(bw, x, two_columns), multiply();
      load_a<0>(aw, x, two_rows), multiply();
      load_b<2>(bw, x, two_columns), multiply();
      load_b<0>(bw, x, two_columns), multiply();
    }
  _tile_stored(0, c, c_bytes);
  if constexpr (two_columns) _tile_stored(1, c + 16, c_bytes);
  if constexpr (two_rows) _tile_stored(2, c + 16 * ldc, c_bytes);
  if constexpr (two_rows && two_columns) _tile_stored(3, c + 16 * ldc + 16, c_bytes);
}

// C [rows][n] (+)= A B; rows of A and C are padded (padded_rows).
template <bool accumulate>
inline void split_matmul(const SplitShape& x, const Word* a, const Word* b, float* c, int64_t ldc, int64_t rows,
                         int64_t n) {
  compiler_barrier();
  for (int64_t j = 0; j < n; j += kSplitPanel, b += kParts * x.words * kSplitPanel)
    for (int64_t i = 0; i < rows; i += 32) {
      const Word* ai = a + i * x.a_row;
      float* cij = c + i * ldc + j;
      if (i + 16 < rows) {
        if (j + 16 < n)
          split_block<accumulate, true, true>(x, ai, b, cij, ldc);
        else
          split_block<accumulate, true, false>(x, ai, b, cij, ldc);
      } else {
        if (j + 16 < n)
          split_block<accumulate, false, true>(x, ai, b, cij, ldc);
        else
          split_block<accumulate, false, false>(x, ai, b, cij, ldc);
      }
    }
}

// Returns whether bf16 does not round x to infinity. Numbers that it does are NaN in a product.
OCTET_INLINE bool splits(float x) { return __builtin_fabsf(x) < 0x1.ffp127f; }

#else

using Split = F32;

#endif

template <class E>
constexpr bool kSplits = std::is_same_v<E, Split>&& E::kTiles;

}  // namespace octet::cpu::OCTET_ISA
