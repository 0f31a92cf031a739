// Rotary position embedding of rows (core/quant/rope.h). A sine per (token, pair) would cost more than all the rest of
// a quantizer: sines of the start of a span of positions and of the distances from it are computed once.
#pragma once
#include <vector>

#include "core/quant/rope.h"
#include "core/rope.h"

namespace octet::cpu {

// Cosines and sines in arrays, which vectorise.
struct CosSins {
  std::vector<double> cosine, sine;
  explicit CosSins(int64_t count) : cosine(count), sine(count) {}
  void set(int64_t i, const CosSin& both) { cosine[i] = both.cosine, sine[i] = both.sine; }
};

// The table of angles that all threads of a call share.
class RopeTable {
 public:
  RopeTable(const Rope& rope, bool inverse)
      : style(rope.style),
        pairs(rope.dim / 2),
        offset(rope.offset),
        turns(rope_turns(rope, inverse)),
        span(kRopeSpan * pairs) {
    for (int64_t i = 0; i < kRopeSpan; ++i)
      for (int64_t c = 0; c < pairs; ++c) span.set(i * pairs + c, cos_sin(times(turns[c], i)));
  }

  octet_rope_style style;
  int64_t pairs, offset;
  std::vector<Turn> turns;
  CosSins span;  // [kRopeSpan, pairs]
};

// Turns rows of T, float or double. One per thread.
template <class T>
class RopeRow {
 public:
  explicit RopeRow(const RopeTable& table)
      : table_(table), start_sines_(table.pairs), cosine_(table.pairs), sine_(table.pairs) {}

  // Turns the row of a token.
  void operator()(T* row, int64_t token) {
    if (table_.style == OCTET_ROPE_NONE) return;
    seek(token + table_.offset);
    const int64_t pairs = table_.pairs;
    const T *cosine = cosine_.data(), *sine = sine_.data();
    if (table_.style == OCTET_ROPE_HALF)
      for (int64_t c = 0; c < pairs; ++c) rotate(row[c], row[c + pairs], cosine[c], sine[c]);
    else
      for (int64_t c = 0; c < pairs; ++c) rotate(row[2 * c], row[2 * c + 1], cosine[c], sine[c]);
  }

 private:
  // Cosines and sines of a position.
  void seek(int64_t position) {
    const int64_t i = position & (kRopeSpan - 1), start = position - i;
    if (!started_ || start != start_) {
      for (int64_t c = 0; c < table_.pairs; ++c) start_sines_.set(c, cos_sin(times(table_.turns[c], start)));
      started_ = true;
      start_ = start;
    }
    const double *p = start_sines_.cosine.data(), *q = start_sines_.sine.data();
    const double *u = table_.span.cosine.data() + i * table_.pairs, *v = table_.span.sine.data() + i * table_.pairs;
    T *const cosine = cosine_.data(), *const sine = sine_.data();
    for (int64_t c = 0; c < table_.pairs; ++c) {
      const CosSin both = joined({p[c], q[c]}, {u[c], v[c]});
      cosine[c] = static_cast<T>(both.cosine), sine[c] = static_cast<T>(both.sine);
    }
  }

  const RopeTable& table_;
  bool started_ = false;
  int64_t start_ = 0;
  CosSins start_sines_;
  std::vector<T> cosine_, sine_;
};

}  // namespace octet::cpu
