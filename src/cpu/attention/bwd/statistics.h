// Means and largest magnitudes over the seen tokens of a head, a tile or a block.
#pragma once
#include "cpu/attention/bwd/operands.h"
#include "cpu/attention/pack/rows.h"
#include "cpu/attention/pack/statistics.h"

namespace octet::cpu::OCTET_ISA {

inline void multiply(float* row, float factor, int64_t n) {
  for (int64_t c = 0; c < n; ++c) row[c] *= factor;
}

inline bool finite_row(const float* row, int64_t n) {
  Vf poison{};
  for (int64_t c = 0; c < n; c += kLanes) poison += load(row + c) * 0.f;
  return reduce_add(poison) == 0.f;
}

inline void zero(float* x, int64_t n) { std::memset(x, 0, sizeof(float) * n); }

// One pass over the seen tokens of a head of x (q or k, minus `mean` if there is one) and y (do or v).
template <class Seen>
HeadStatistics head_statistics(const View& x, const View& y, int64_t b, int64_t h, int64_t first, int64_t tokens,
                               const Seen& seen, const float* mean) {
  alignas(64) float row[kMaxDim];
  HeadStatistics s{};
  const int64_t x_width = padded_columns(x.shape[3]), y_width = padded_columns(y.shape[3]);
  for (int64_t t = first; t < first + tokens; ++t) {
    if (!seen(t - first)) continue;
    load_numbers(x, b, h, t, 1, 1, x_width, row);
    if (!finite_row(row, x_width)) zero(row, x_width);
    if (mean) subtract(row, mean, x.shape[3]);
    s.largest = std::max(s.largest, finite_amax(row, x_width));
    load_numbers(y, b, h, t, 1, 1, y_width, row);
    if (!finite_row(row, y_width)) continue;
    s.value_largest = std::max(s.value_largest, finite_amax(row, y_width));
  }
  return s;
}

// Mean of k or v over the seen tokens of a head, in token order, in double, rounded once.
inline void mean_of_tokens(const View& t, const Sequence& seq, int64_t g, const SeenTokens& seen, float* mean) {
  alignas(64) float row[kMaxDim];
  double sum[kMaxDim] = {};
  const float limit = limit_of(t, seq, g, seen);
  const int64_t dim = t.shape[3];
  for (int64_t j = seen.range.first; j < seen.range.last; ++j) {
    if (!seen[j]) continue;
    load_numbers(t, seq.batch, g, seq.k_first + j, 1, 1, dim, row);
    for (int64_t c = 0; c < dim; ++c)
      if (__builtin_fabsf(row[c]) < limit) sum[c] += row[c];
  }
  for (int64_t c = 0; c < dim; ++c)
    mean[c] = static_cast<float>(sum[c] / static_cast<double>(std::max<int64_t>(seen.count(), 1)));
}

// Writes the mean of the seen rows among at most kSampledTokens, summed in double and rounded once.
template <class Seen>
void mean_of_rows(const float* rows, int64_t count, int64_t width, const Seen& seen, float* mean) {
  double sum[kMaxDim] = {};
  float largest[kSampledTokens];
  int64_t tokens = 0;
  for (int64_t r = 0; r < count; ++r)
    if (seen(r)) largest[tokens++] = finite_amax(rows + r * width, width);
  const float limit = mean_limit(largest, tokens);
  for (int64_t r = 0; r < count; ++r)
    for (int64_t c = 0; c < width && seen(r); ++c)
      if (const float x = rows[r * width + c]; __builtin_fabsf(x) < limit) sum[c] += x;
  for (int64_t c = 0; c < width; ++c)
    mean[c] = static_cast<float>(sum[c] / static_cast<double>(std::max<int64_t>(tokens, 1)));
}

}  // namespace octet::cpu::OCTET_ISA
