// The constants and the scratch memory of a block of queries depend on the engines of q k^T and P V.
#pragma once
#include "cpu/attention/fwd/accumulate_8bit.h"
#include "cpu/attention/pack/key_side.h"

namespace octet::cpu::OCTET_ISA {

// Returns whether the product of P with V is formed apart, for a part of a step at a time, and then added to o. 8-bit P
// is an integer, and each part has a scale of its own. f16 P is the one that gradients build on: next to a large sum
// small probabilities would be lost one by one, always downwards; a few at a time they are not (coherence of the error
// of delta on tied maxima: 0.91, by tiles 0.13, by quarters of a tile below 0.1).
constexpr bool through_strip(PFormat format) { return format == PFormat::u8 || format == PFormat::f16; }
constexpr int64_t kF16Part = 16;  // keys

// Tiles of v that meet P at a time: two of a panel of floats fill two thirds of the first cache.
template <class Pv>
constexpr int64_t kTilesAtOnce = std::is_same_v<Pv, F32> ? 2 : kMaxStepKeys / kKeys;

// Rows of a block of queries: a multiple of the rows that the inner loops of the engines take at a time (tiles 32,
// vectors 6), as many as keep q, s and o in the second cache. Words of f32 fill that with k and v alone, which many
// rows read less often.
template <class Qk, class Pv>
constexpr int64_t kBlockRows = std::is_same_v<Qk, F32> || kSplits<Qk> ? 192
                               : Qk::kTiles&& Pv::kTiles              ? 64
                                                                      : 96;

// Set where the logits of the next step are found before P V of this one, so that tiles start once for both; P then
// does not lie in the place of its logits.
template <class Pv>
constexpr bool kLogitsAhead = Pv::kTiles&& std::is_same_v<typename Pv::Element, uint8_t>;

// Scratch memory of one thread. A row of P takes the place of the logits it comes from.
template <class Qk, class Pv>
struct ForwardScratch {
  static constexpr int64_t kRows = kBlockRows<Qk, Pv>;
  static constexpr int64_t kQPad = kSplits<Qk> ? 16 : 0;  // words: rows a power of two apart share cache sets
  static constexpr int64_t kPWords = kSplits<Pv> ? words_of<Pv>(kMaxStepKeys) + 16 : kMaxStepKeys / Pv::kPerWord;

  int64_t stride;           // of s: rows a power of two apart would compete for cache sets
  Word* q;                  // [kRows][k_words + kQPad]
  typename Qk::Sum* s;      // [kRows][stride]
  Word* p;                  // [kRows][kPWords], where P has a place of its own
  typename Pv::Sum* strip;  // [parts][kRows][kStripColumns] of P V, if it goes that way
  float* o;                 // [kRows][v_columns]

  static ForwardScratch allocate(const ForwardNumerics& numerics, const KeySide& side, WorkspaceAllocator& workspace) {
    ForwardScratch t;
    t.stride = numerics.step_tiles * kKeys + 16;
    t.s = workspace.take<typename Qk::Sum>(kRows * t.stride);
    t.q = workspace.take<Word>(kRows * (side.k_words + kQPad));
    t.o = workspace.take<float>(kRows * side.v_columns);
    t.p = kLogitsAhead<Pv> || kSplits<Pv> ? workspace.take<Word>(kRows * kPWords) : nullptr;
    const int64_t parts = numerics.p == PFormat::u8 ? kStepTiles : 1;
    const bool strip = through_strip(numerics.p) && !kLogitsAhead<Pv>;
    t.strip = strip ? workspace.take<typename Pv::Sum>(parts * kRows * kStripColumns) : nullptr;
    return t;
  }

  typename Qk::Sum* s_row(int64_t i) const { return s + i * stride; }
  float* logits_row(int64_t i) const { return reinterpret_cast<float*>(s_row(i)); }
  typename Pv::Element* p_row(int64_t i) const {
    return reinterpret_cast<typename Pv::Element*>(p_words() + i * p_stride());
  }
  // The memory of P.
  Word* p_words() const { return kLogitsAhead<Pv> ? p : reinterpret_cast<Word*>(s); }
  int64_t p_stride() const { return kLogitsAhead<Pv> ? kPWords : stride; }
};

}  // namespace octet::cpu::OCTET_ISA
