// o = alpha o + P V of one step, by the engine of the recipe.
#pragma once
#include "cpu/attention/fwd/accumulate_8bit.h"
#include "cpu/attention/fwd/config.h"

namespace octet::cpu::OCTET_ISA {

inline bool v_finite(const KeySide& side, int64_t index, int64_t tiles) {
  return std::all_of(side.v_finite + index, side.v_finite + index + tiles, [](bool finite) { return finite; });
}

// Tiles of k, and those of a panel of v, lie in the order in which they are needed.
inline Ahead following(const Word* tile, int64_t words) {
  return {tile + words, words * static_cast<int64_t>(sizeof(Word))};
}

// o = alpha o + product, for one row.
OCTET_INLINE void add_product(float* o, const float* product, float alpha, int64_t columns) {
  for (int64_t c = 0; c < columns; c += kLanes) store(o + c, load(o + c) * alpha + load(product + c));
}

// n columns of f16 P, a few keys at a time.
template <class Qk, class Pv, int64_t block_rows>
inline void accumulate_f16(const ForwardScratch<Qk, Pv>& scratch, const KeySide& side,
                           const RowState<block_rows>& state, int64_t index, int64_t tiles, int64_t rows, int64_t first,
                           int64_t n) {
  constexpr int64_t kWords = kF16Part / Pv::kPerWord;
  const int64_t columns = side.v_columns;
  const Strides strides{scratch.stride, 1};
  for (int64_t word = 0; word < tiles * side.v_words; word += kWords) {
    const Word *p_part = scratch.p_words() + word, *v = side.v + index * side.v_stride + word * columns + first;
    if (side.v_finite[index + word / side.v_words]) {
      matmul<Pv, false>(p_part, strides, v, columns, scratch.strip, kStripColumns, rows, n, kWords);
    } else {
      std::memset(scratch.strip, 0, sizeof *scratch.strip * rows * kStripColumns);
      matmul_skipping_zeros<Pv>(p_part, strides, v, columns, scratch.strip, kStripColumns, rows, n, kWords);
    }
    for (int64_t i = 0; i < rows; ++i)
      add_product(scratch.o + i * columns + first, scratch.strip + i * kStripColumns, word ? 1.f : state.alpha[i], n);
  }
}

#ifdef __AMX_BF16__

// Float32 in tiles.
template <class Qk, class Pv, int64_t block_rows>
inline void accumulate_split(const ForwardScratch<Qk, Pv>& scratch, const KeySide& side,
                             const RowState<block_rows>& state, int64_t index, int64_t tiles, int64_t rows) {
  constexpr int64_t kPWords = ForwardScratch<Qk, Pv>::kPWords;
  const int64_t columns = side.v_columns, words = part_words(kKeys);
  for (int64_t i = 0; i < rows; ++i) {
    split_row(scratch.logits_row(i), tiles * kKeys, tiles * words, scratch.p + i * kPWords);
    if (state.alpha[i] != 1.f) scale_row(scratch.o + i * columns, state.alpha[i], columns);
  }
  constexpr int64_t kPieces = 2;  // of a panel of v, in the first cache
  SplitShape shape{
      .words = words, .a_row = kPWords, .a_part = tiles * words, .a_piece = words, .b_piece = side.v_stride};
  for (int64_t first = 0; first < tiles; first += kPieces) {
    shape.pieces = std::min(kPieces, tiles - first);
    const Word* v = side.v + (index + first) * side.v_stride;
    split_matmul<true>(shape, scratch.p + first * words, v, scratch.o, columns, rows, columns);
  }
}

// Adds products with numbers of v that are too large for bf16 or not finite, which zeros of P skip.
template <class Qk, class Pv>
inline void add_what_does_not_split(const Problem& p, const ForwardScratch<Qk, Pv>& scratch, const KeySide& side,
                                    const Sequence& seq, int64_t g, int64_t key, int64_t keys, int64_t rows) {
  alignas(64) float v[kMaxDim];
  for (int64_t j = 0; j < std::min(keys, seq.k_tokens - key); ++j) {
    load_numbers(p.v, seq.batch, g, seq.k_first + key + j, 1, 1, side.v_columns, v);
    for (int64_t c = 0; c < p.dim_v; ++c)
      for (int64_t i = 0; i < rows && !splits(v[c]); ++i)
        if (const float own_p = scratch.logits_row(i)[j]; own_p != 0.f)
          scratch.o[i * side.v_columns + c] += own_p * v[c];
  }
}

#endif

template <PFormat format, class Qk, class Pv, int64_t block_rows>
inline void accumulate(const ForwardScratch<Qk, Pv>& scratch, const KeySide& side, const RowState<block_rows>& state,
                       int64_t index, int64_t tiles, int64_t rows) {
  const int64_t columns = side.v_columns;
#ifdef __AMX_BF16__
  if constexpr (kSplits<Pv>) return accumulate_split(scratch, side, state, index, tiles, rows);
#endif
  if constexpr (format == PFormat::u8) {
    accumulate_8bit<Pv>({scratch.p_words(), scratch.p_stride(), side.v + index * side.v_stride, side.v_stride,
                         side.v_words, tiles, columns, side.v_zero ? side.v_zero + index * kKeys : nullptr},
                        rows, state.alpha, state.p_scale, scratch.strip, scratch.o);
  } else if constexpr (format == PFormat::f16) {
    for (int64_t first = 0; first < columns; first += kStripColumns)
      accumulate_f16(scratch, side, state, index, tiles, rows, first, std::min(columns - first, kStripColumns));
  } else {
    for (int64_t i = 0; i < rows; ++i)
      if (state.alpha[i] != 1.f) scale_row(scratch.o + i * columns, state.alpha[i], columns);
    const Strides strides{scratch.stride, 1};
    const bool finite = v_finite(side, index, tiles);
    for (int64_t c = 0; c < columns; c += side.v_panel)
      for (int64_t tile = 0, count; tile < tiles; tile += count) {
        count = finite ? std::min(kTilesAtOnce<Pv>, tiles - tile) : 1;
        const int64_t width = side.panel_width(c), words = count * side.v_words;
        const Word *own_p = scratch.p_words() + tile * side.v_words, *v = side.v_at(index + tile, c);
        if (finite)
          matmul<Pv, true>(own_p, strides, v, width, scratch.o + c, columns, rows, width, words,
                           following(v, words * width));
        else
          matmul_skipping_zeros<Pv>(own_p, strides, v, width, scratch.o + c, columns, rows, width, words);
      }
  }
}

}  // namespace octet::cpu::OCTET_ISA
