// C = A B and C += A B on small dense operands, the one inner loop of every pass.
//
// Operands are made of 32-bit words: one float, two bf16 or four 8-bit integers that one instruction multiplies and
// sums. A is [rows][words], row-major (any two strides). B is [words][columns]: word w of column n holds the elements
// of B that meet word w of a row of A. C is [rows][columns] of float or int32. The same layout feeds FMA, dot-product
// and tile instructions, so an engine is only the instruction it uses.
#pragma once
#include <algorithm>
#include <type_traits>

#include "cpu/gemm/simd.h"

namespace octet::cpu::OCTET_ISA {

using Word = uint32_t;

// f32 x f32 -> f32
struct F32 {
  using Element = float;
  using Sum = float;
  using Vector = Vf;
  static constexpr int kPerWord = 1;
  static constexpr bool kTiles = false;
  OCTET_INLINE Vf dot(Vf sum, Vi a, Vi b) { return sum + floats(a) * floats(b); }
};

// bf16 x bf16 -> f32. Without the instruction, floats that hold bf16 values.
#ifdef __AVX512BF16__
struct Bf16 {
  using Element = uint16_t;
  using Sum = float;
  using Vector = Vf;
  static constexpr int kPerWord = 2;
#ifdef __AMX_BF16__
  static constexpr bool kTiles = true;
#else
  static constexpr bool kTiles = false;
#endif
  OCTET_INLINE Vf dot(Vf sum, Vi a, Vi b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
};
#else
struct Bf16 : F32 {};
#endif

// 8-bit integers, A unsigned (P) or signed (q) times signed B -> int32, exact. Without the instruction, floats that
// hold integers: sums below 2^24 are exact too. The dot-product instruction wants A unsigned, so it gets signed A plus
// kBias, and the sums are corrected by -kBias times the column sums of B.
#ifdef __AVX512VNNI__
struct UInt8 {
  using Element = uint8_t;
  using Sum = int32_t;
  using Vector = Vi;
  static constexpr int kPerWord = 4;
#ifdef __AMX_INT8__
  static constexpr bool kTiles = true;
#else
  static constexpr bool kTiles = false;
#endif
  OCTET_INLINE Vi dot(Vi sum, Vi a, Vi b) { return (Vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b); }
};
struct Int8 : UInt8 {};
#else
struct UInt8 : F32 {};
struct Int8 : F32 {};
#endif

template <class E>
constexpr int kBias = 0;
#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)
template <>
constexpr int kBias<Int8> = 128;
#endif

template <class E>
constexpr int64_t words_of(int64_t elements) {
  const int64_t words = (elements + E::kPerWord - 1) / E::kPerWord;
  return E::kTiles ? (words + 15) / 16 * 16 : words;
}
template <class E>
constexpr int64_t padded(int64_t elements) {
  return words_of<E>(elements) * E::kPerWord;
}
// Columns of B and C, and rows of A and C, as the inner loops want them.
constexpr int64_t kColumnStep = kLanes;
constexpr int64_t padded_columns(int64_t n) { return (n + kColumnStep - 1) / kColumnStep * kColumnStep; }
constexpr int64_t kRowStep = 16;
constexpr int64_t padded_rows(int64_t n) { return (n + kRowStep - 1) / kRowStep * kRowStep; }

// Columns of C in registers, where there are no tiles.
constexpr int64_t kPanelColumns = (kLanes == 16 ? 4 : 2) * kLanes;

struct Strides {
  int64_t row, word;
};

// A word in every lane, in a register: left alone, the compiler would fold the broadcast into every instruction that
// uses it, and loads, not multiplications, would be the limit (83 % of the FMA peak instead of 95 %).
OCTET_INLINE Vi broadcast(Word a) {
  Vi x = splat(static_cast<int32_t>(a));
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__x86_64__)
  asm("" : "+x"(x));
#endif
  return x;
}

// MR rows by NR vectors of C in registers.
template <class E, int MR, int NR, bool accumulate>
OCTET_INLINE void block(const Word* a, Strides as, const Word* b, int64_t columns, typename E::Sum* c, int64_t ldc,
                        int64_t words) {
  typename E::Vector sum[MR][NR];
  for (int i = 0; i < MR; ++i)
    for (int j = 0; j < NR; ++j) sum[i][j] = accumulate ? load(c + i * ldc + j * kLanes) : typename E::Vector{};
  const Word* half[2] = {a, a + 3 * as.row};  // three rows from each: few address registers
  for (int64_t w = 0; w < words; ++w) {
    Vi y[NR];
    for (int j = 0; j < NR; ++j) y[j] = load(reinterpret_cast<const int32_t*>(b + w * columns) + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const Vi x = broadcast(half[i / 3][i % 3 * as.row + w * as.word]);
#pragma GCC unroll 8
      for (int j = 0; j < NR; ++j) sum[i][j] = E::dot(sum[i][j], x, y[j]);
    }
  }
  for (int i = 0; i < MR; ++i)
    for (int j = 0; j < NR; ++j) store(c + i * ldc + j * kLanes, sum[i][j]);
}

// Memory that is needed next, fetched into the second cache a few lines at a time while a product runs.
struct Ahead {
  const void* memory = nullptr;
  int64_t bytes = 0;

  // The share of rows [first, first + count) of `rows`.
  void fetch(int64_t first, int64_t count, int64_t rows) const {
    const char* p = static_cast<const char*>(memory);
    for (int64_t i = bytes * first / rows; i < bytes * (first + count) / rows; i += 64) __builtin_prefetch(p + i, 0, 2);
  }
};

template <class E, int NR, bool accumulate>
inline void column_strip(const Word* a, Strides as, const Word* b, int64_t columns, typename E::Sum* c, int64_t ldc,
                         int64_t rows, int64_t words, Ahead ahead) {
  int64_t i = 0;
  for (; i + 6 <= rows; i += 6) {
    ahead.fetch(i, 6, rows / 6 * 6);
    block<E, 6, NR, accumulate>(a + i * as.row, as, b, columns, c + i * ldc, ldc, words);
  }
  for (; i + 4 <= rows; i += 4) block<E, 4, NR, accumulate>(a + i * as.row, as, b, columns, c + i * ldc, ldc, words);
  for (; i + 2 <= rows; i += 2) block<E, 2, NR, accumulate>(a + i * as.row, as, b, columns, c + i * ldc, ldc, words);
  for (; i < rows; ++i) block<E, 1, NR, accumulate>(a + i * as.row, as, b, columns, c + i * ldc, ldc, words);
}

#ifdef __AMX_TILE__

// The tile intrinsics do not tell the compiler which memory they read; this makes it write everything first.
inline void compiler_barrier() { asm volatile("" ::: "memory"); }

// Tiles 0-3: C, 4-5: A, 6-7: B, all 16 rows of 64 bytes.
inline void configure_tiles() {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  compiler_barrier();
  _tile_loadconfig(&config);
}
inline void release_tiles() { _tile_release(); }

// The intrinsics paste tile numbers into the instruction, so they must be literals: hence a macro.
#define OCTET_TILE_DOT(c, a, b)                 \
  do {                                          \
    if constexpr (std::is_same_v<E, Bf16>)      \
      _tile_dpbf16ps(c, a, b);                  \
    else if constexpr (std::is_same_v<E, Int8>) \
      _tile_dpbssd(c, a, b);                    \
    else                                        \
      _tile_dpbusd(c, a, b);                    \
  } while (false)

// 16 or 32 rows by 16 or 32 columns of C in four tiles. B comes from afar and is used once: it should not push C out of
// the nearest cache.
template <class E, bool accumulate, bool two_rows, bool two_columns>
inline void tile_block(const Word* a, int64_t lda, const Word* b, int64_t columns, typename E::Sum* c, int64_t ldc,
                       int64_t words) {
  const int64_t c_bytes = ldc * 4, a_bytes = lda * 4, b_bytes = columns * 4;
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
  for (int64_t w = 0; w < words; w += 16) {
    _tile_loadd(4, a + w, a_bytes);
    _tile_stream_loadd(6, b + w * columns, b_bytes);
    OCTET_TILE_DOT(0, 4, 6);
    if constexpr (two_columns) {
      _tile_stream_loadd(7, b + w * columns + 16, b_bytes);
      OCTET_TILE_DOT(1, 4, 7);
    }
    if constexpr (two_rows) {
      _tile_loadd(5, a + 16 * lda + w, a_bytes);
      OCTET_TILE_DOT(2, 5, 6);
      if constexpr (two_columns) OCTET_TILE_DOT(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (two_columns) _tile_stored(1, c + 16, c_bytes);
  if constexpr (two_rows) _tile_stored(2, c + 16 * ldc, c_bytes);
  if constexpr (two_rows && two_columns) _tile_stored(3, c + 16 * ldc + 16, c_bytes);
}

template <class E, bool accumulate>
inline void tile_matmul(const Word* a, int64_t lda, const Word* b, int64_t columns, typename E::Sum* c, int64_t ldc,
                        int64_t rows, int64_t n, int64_t words) {
  compiler_barrier();
  for (int64_t j = 0; j < n; j += 32)
    for (int64_t i = 0; i < rows; i += 32) {
      const Word* ai = a + i * lda;
      typename E::Sum* cij = c + i * ldc + j;
      if (i + 16 < rows) {
        if (j + 16 < n)
          tile_block<E, accumulate, true, true>(ai, lda, b + j, columns, cij, ldc, words);
        else
          tile_block<E, accumulate, true, false>(ai, lda, b + j, columns, cij, ldc, words);
      } else {
        if (j + 16 < n)
          tile_block<E, accumulate, false, true>(ai, lda, b + j, columns, cij, ldc, words);
        else
          tile_block<E, accumulate, false, false>(ai, lda, b + j, columns, cij, ldc, words);
      }
    }
}

#else

inline void configure_tiles() {}
inline void release_tiles() {}

#endif

// C [rows][n] (+)= A [rows][words] B [words][columns]. n is a multiple of kColumnStep; rows of A, C and words of
// engines with tiles are padded (padded_rows, words_of), everybody else takes any row count and fetches `ahead`.
template <class E, bool accumulate>
inline void matmul(const void* a_words, Strides as, const void* b_words, int64_t columns, typename E::Sum* c,
                   int64_t ldc, int64_t rows, int64_t n, int64_t words, Ahead ahead = {}) {
  const Word* a = static_cast<const Word*>(a_words);
  const Word* b = static_cast<const Word*>(b_words);
#ifdef __AMX_TILE__
  if constexpr (E::kTiles)
    return tile_matmul<E, accumulate>(a, as.row, b, columns, c, ldc, padded_rows(rows), n, words);
#endif
  int64_t j = 0;
  for (; j + kPanelColumns <= n; j += kPanelColumns)
    column_strip<E, kPanelColumns / kLanes, accumulate>(a, as, b + j, columns, c + j, ldc, rows, words, ahead);
  for (; j < n; j += kLanes) column_strip<E, 1, accumulate>(a, as, b + j, columns, c + j, ldc, rows, words, ahead);
}

// Element e of a word, as a number; float engines.
template <class E>
OCTET_INLINE float element(Word word, int e) {
  if constexpr (E::kPerWord == 2) word = e ? word & 0xffff0000u : word << 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

OCTET_INLINE bool is_finite(float x) { return __builtin_fabsf(x) < __builtin_inff(); }

// C += A B for a B with infinities or NaN, which zeros of A skip: 0 NaN would be NaN. The product with the finite part
// of B comes first, by the same instructions as ever, so that rows of A that skip the rest keep their bits.
// At most kMaxWords words.
template <class E>
inline void matmul_skipping_zeros(const void* a_words, Strides as, const void* b_words, int64_t columns, float* c,
                                  int64_t ldc, int64_t rows, int64_t n, int64_t words) {
  constexpr int64_t kMaxWords = 128, kStrip = 64;
  constexpr Word kOthers[2] = {E::kPerWord == 2 ? 0xffff0000u : 0u, 0x0000ffffu};
  const Word* a = static_cast<const Word*>(a_words);
  alignas(64) Word finite[kMaxWords * kStrip];
  for (int64_t first = 0; first < n; first += kStrip) {
    const int64_t width = std::min(kStrip, n - first);
    const Word* b = static_cast<const Word*>(b_words) + first;
    for (int64_t w = 0; w < words; ++w)
      for (int64_t j = 0; j < width; ++j) {
        Word word = b[w * columns + j];
        for (int e = 0; e < E::kPerWord; ++e)
          if (!is_finite(element<E>(word, e))) word &= kOthers[e];
        finite[w * kStrip + j] = word;
      }
    matmul<E, true>(a, as, finite, kStrip, c + first, ldc, rows, width, words);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t w = 0; w < words; ++w)
        for (int e = 0; e < E::kPerWord; ++e) {
          const float x = element<E>(a[i * as.row + w * as.word], e);
          for (int64_t j = 0; j < width && x != 0.f; ++j) {
            const float y = element<E>(b[w * columns + j], e);
            if (!is_finite(y)) c[i * ldc + first + j] += x * y;
          }
        }
  }
}

}  // namespace octet::cpu::OCTET_ISA
