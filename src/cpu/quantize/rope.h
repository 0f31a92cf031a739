// Rotary position embedding (RoFormer, arXiv 2104.09864): pair c of a token turns by position * theta_c with
// theta_c = base^(-2c / dim). Angles, cosines and sines are computed in double and rounded once to the type of the row.
//
// A sine per (token, pair) would cost more than all the rest of a quantizer. Positions are therefore split into
// position = start + i with start a multiple of 64; cosines and sines of start and of i are looked up or computed
// once, and joined by the addition theorems, with an error of a few units of 2^-53.
#pragma once
#include <cmath>
#include <vector>

#include "core/quantization.h"

namespace octet::cpu {

// Rotates the pairs (c, c + pairs) of a row by the angles whose cosines and sines are given. Products are taken in
// double: those of two floats are exact there.
template <class T>
static inline void rope_half(T* x, const T* cosine, const T* sine, int64_t pairs) {
  T* y = x + pairs;
  for (int64_t c = 0; c < pairs; ++c) {
    const double a = x[c], b = y[c], p = cosine[c], q = sine[c];
    x[c] = static_cast<T>(a * p - b * q);
    y[c] = static_cast<T>(a * q + b * p);
  }
}

// Rotates the pairs (2c, 2c + 1) likewise.
template <class T>
static inline void rope_interleaved(T* x, const T* cosine, const T* sine, int64_t pairs) {
  for (int64_t c = 0; c < pairs; ++c) {
    const double a = x[2 * c], b = x[2 * c + 1], p = cosine[c], q = sine[c];
    x[2 * c] = static_cast<T>(a * p - b * q);
    x[2 * c + 1] = static_cast<T>(a * q + b * p);
  }
}

// The table of angles that all threads of a call share.
class RopeTable {
 public:
  static constexpr int64_t kSpan = 64;

  // `direction`: 1, or -1 for the inverse.
  RopeTable(const Rope& rope, double direction)
      : style(rope.style),
        pairs(rope.dim / 2),
        offset(rope.offset),
        theta(pairs),
        cosine(kSpan * pairs),
        sine(kSpan * pairs) {
    for (int64_t c = 0; c < pairs; ++c)
      theta[c] = direction * std::pow(rope.base, -2.0 * static_cast<double>(c) / static_cast<double>(rope.dim));
    if (style == OCTET_ROPE_NONE) return;
    for (int64_t i = 0; i < kSpan; ++i)
      for (int64_t c = 0; c < pairs; ++c) {
        cosine[i * pairs + c] = std::cos(static_cast<double>(i) * theta[c]);
        sine[i * pairs + c] = std::sin(static_cast<double>(i) * theta[c]);
      }
  }

  octet_rope_style style;
  int64_t pairs, offset;
  std::vector<double> theta, cosine, sine;  // the latter two [kSpan, pairs]
};

// Turns rows of T, float or double. One per thread.
template <class T>
class RopeRow {
 public:
  explicit RopeRow(const RopeTable& table)
      : table_(table), start_cosine_(table.pairs), start_sine_(table.pairs), cosine_(table.pairs), sine_(table.pairs) {}

  // Turns the row of a token.
  void operator()(T* row, int64_t token) {
    if (table_.style == OCTET_ROPE_NONE) return;
    seek(token + table_.offset);
    if (table_.style == OCTET_ROPE_HALF)
      rope_half(row, cosine_.data(), sine_.data(), table_.pairs);
    else
      rope_interleaved(row, cosine_.data(), sine_.data(), table_.pairs);
  }

 private:
  // Cosines and sines of a position.
  void seek(int64_t position) {
    const int64_t i = position & (RopeTable::kSpan - 1), start = position - i;
    if (!started_ || start != start_) {
      for (int64_t c = 0; c < table_.pairs; ++c) {
        start_cosine_[c] = std::cos(static_cast<double>(start) * table_.theta[c]);
        start_sine_[c] = std::sin(static_cast<double>(start) * table_.theta[c]);
      }
      started_ = true;
      start_ = start;
    }
    const double *p = start_cosine_.data(), *q = start_sine_.data();
    const double *u = table_.cosine.data() + i * table_.pairs, *v = table_.sine.data() + i * table_.pairs;
    for (int64_t c = 0; c < table_.pairs; ++c) {
      cosine_[c] = static_cast<T>(p[c] * u[c] - q[c] * v[c]);
      sine_[c] = static_cast<T>(p[c] * v[c] + q[c] * u[c]);
    }
  }

  const RopeTable& table_;
  bool started_ = false;
  int64_t start_ = 0;
  std::vector<double> start_cosine_, start_sine_;
  std::vector<T> cosine_, sine_;
};

}  // namespace octet::cpu
