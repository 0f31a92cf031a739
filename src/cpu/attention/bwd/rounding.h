// Rows rounded to the formats of the recipe, rotated, and laid out as operands.
#pragma once
#include "cpu/attention/bwd/statistics.h"

namespace octet::cpu::OCTET_ISA {

constexpr Rounding kF16InAnyRange{OCTET_F16, 1};

// Rounds rows to numbers of a format; with a scale a row that is not finite becomes NaN. `shared`: the largest
// magnitude of their group if it reaches beyond them, else negative.
inline void round_rows(const Rounding& how, float shared, float* rows, int64_t count, int64_t width) {
  if (how.dtype == OCTET_F32) return;
  if (how.dtype == OCTET_F16 && how.group) {
    for (int64_t i = 0; i < count * width; i += kLanes) store(rows + i, round_11_bits(load(rows + i)));
    return;
  }
  const int64_t group = how.group && shared < 0.f ? how.group : count;
  for (int64_t first = 0; first < count; first += group) {
    const int64_t last = std::min(first + group, count);
    Scale scale{1.f, 1.f};
    if (how.group) {
      float largest = shared;
      if (shared < 0.f)
        for (int64_t r = first; r < last; ++r) largest = std::max(largest, finite_amax(rows + r * width, width));
      scale = scale_of(largest, largest_quantized(how.dtype));
    }
    for (int64_t r = first; r < last; ++r) {
      const bool lost = how.group && !finite_row(rows + r * width, width);
      round_row_to(how.dtype, scale.inverse, rows + r * width, width);
      if (how.group) multiply(rows + r * width, lost ? __builtin_nanf("") : scale.scale, width);
    }
  }
}

// `shared` of round_rows for a block of queries from `token` on.
inline float shared_amax(const Problem& p, const Rounding& how, const View& t, const Sequence& seq, int64_t h,
                         int64_t token, float head, const GradientOperands& w) {
  if (how.group == kWholeHead) return head;
  if (how.group <= kQueries) return -1.f;
  alignas(64) float row[kMaxDim];
  float largest = 0.f;
  const int64_t first = token / how.group * how.group, width = padded_columns(t.shape[3]);
  for (int64_t i = first; i < std::min(first + how.group, seq.q_tokens); ++i) {
    if (!seen_query(p, seq, h, i, w)) continue;
    load_numbers(t, seq.batch, h, seq.q_first + i, 1, 1, width, row);
    largest = std::max(largest, finite_row(row, width) ? finite_amax(row, width) : 0.f);
  }
  return largest;
}

inline void rotate_rows(float* rows, int64_t count, int64_t width, int64_t dim) {
  const Signs signs(kHadamardSeed, dim);
  for (int64_t r = 0; r < count; ++r) hadamard_row(rows + r * width, signs.sign, dim);
}

// [kKeys][columns] numbers as B of ds k.
inline void store_rows(const float* rows, int64_t columns, Word* out) {
#ifdef __AMX_BF16__
  split_columns(rows, kKeys, kKeys, columns, out);
#else
  for (int64_t c = 0, width; c < columns; c += width) {
    width = std::min(kPanelColumns, columns - c);
    for (int64_t r = 0; r < kKeys; ++r)
      std::memcpy(out + c * kKeys + r * width, rows + r * columns + c, sizeof(float) * width);
  }
#endif
}

// [dim][kKeys] numbers as B of q k^T and do v^T.
inline void store_columns(const float* columns, int64_t dim, Word* out) {
#ifdef __AMX_BF16__
  split_columns(columns, dim, dim, kKeys, out);
#else
  std::memcpy(out, columns, sizeof(float) * dim * kKeys);
#endif
}

}  // namespace octet::cpu::OCTET_ISA
