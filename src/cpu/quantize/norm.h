// RMS norm of rows (core/quant/norm.h).
#pragma once
#include <bit>
#include <cmath>
#include <vector>

#include "core/quant/norm.h"
#include "core/quantization.h"
#include "cpu/quantize/elements.h"

namespace octet::cpu {

// Normalises rows of T, float or double. One per thread.
template <class T>
class NormRow {
 public:
  NormRow(const Rope& rope, int64_t dim) : rope_(rope), dim_(dim) {
    if (rope.norm == OCTET_NORM_NONE) return;
    const auto blocks = static_cast<uint64_t>((dim + kNormBlock - 1) / kNormBlock);
    sums_.resize(std::bit_ceil(blocks));
    weight_.assign(static_cast<std::size_t>(dim), T{1});
  }

  // Normalises the row of a head.
  void operator()(T* row, int64_t head) {
    if (rope_.norm == OCTET_NORM_NONE) return;
    if (rope_.norm_weight.present() && head != head_) load_row(rope_.norm_weight, 0, head, 0, weight_.data());
    head_ = head;
    const T scale = inverse_rms(sum_of_squares(row), dim_, rope_.norm_eps, [](T x) { return std::sqrt(x); });
    for (int64_t c = 0; c < dim_; ++c) row[c] = row[c] * scale * weight_[c];
  }

 private:
  T sum_of_squares(const T* row) {
    const int64_t whole = dim_ / kNormBlock;
    std::fill(sums_.begin() + whole, sums_.end(), T{0});
    for (int64_t b = 0; b < whole; ++b) sums_[b] = sum_of_block<T>([&](int i) { return row[b * kNormBlock + i]; });
    if (dim_ % kNormBlock)
      sums_[whole] = sum_of_block<T>([&](int i) {
        const int64_t c = whole * kNormBlock + i;
        return c < dim_ ? row[c] : T{0};
      });
    for (std::size_t half = sums_.size() / 2; half; half /= 2)
      for (std::size_t b = 0; b < half; ++b) sums_[b] += sums_[b + half];
    return sums_[0];
  }

  const Rope& rope_;
  int64_t dim_, head_ = -1;
  std::vector<T> sums_, weight_;
};

}  // namespace octet::cpu
