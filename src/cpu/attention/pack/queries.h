// One block of queries: rows rotated, scaled, rounded, and laid out in words, as often as there are blocks.
#pragma once
#include "cpu/attention/pack/int8.h"
#include "cpu/attention/pack/seen.h"
#include "cpu/attention/pack/words.h"
#include "cpu/gemm/split.h"

namespace octet::cpu::OCTET_ISA {

// Largest finite magnitude of q in `group` tokens from `token` on.
inline float group_amax(const Problem& p, const Sequence& seq, int64_t h, int64_t token, int64_t group) {
  alignas(64) float row[kMaxDim];
  float largest = 0.f;
  for (int64_t i = token; i < token + group && i < seq.q_tokens; ++i) {
    if (!sees_a_key(p, seq, h, i)) continue;
    load_numbers(p.q, seq.batch, h, seq.q_first + i, 1, 1, padded_columns(p.dim), row);
    const float a = row_amax(row, padded_columns(p.dim));
    largest = a > largest && a < __builtin_inff() ? a : largest;
  }
  return largest;
}

// q.mean for each row of q and the mean that smoothing took from k. `zero`: the zero points of the rows, or null.
inline void mean_logits(const Problem& p, const ForwardNumerics& numerics, const float* q, int64_t rows, int64_t width,
                        const Signs& signs, const float* k_mean, const int32_t* zero, double* out) {
  alignas(64) float mean[kMaxDim] = {};
  std::memcpy(mean, k_mean, sizeof(float) * static_cast<std::size_t>(p.dim));
  if (numerics.q_prequantized && p.q.quantization && p.q.quantization->hadamard_seed)
    hadamard_row(mean, signs.sign, p.dim);
  double sum = 0.0;
  for (int64_t c = 0; c < p.dim && zero; ++c) sum += mean[c];
  for (int64_t r = 0; r < rows; ++r) out[r] = dot_in_double(q + r * width, mean, p.dim) - (zero ? zero[r] * sum : 0.0);
}

// A scale, or 1 for that of a row of zeros: scales are divided by, and multiplied with infinities.
OCTET_INLINE float divisible(float scale) { return scale > 0.f || scale != scale ? scale : 1.f; }

// The facts about the rows of a block that pack_queries finds out.
struct QueryRows {
  float scale[kMaxBlockRows];        // 1 without scales
  double mean_logit[kMaxBlockRows];  // q.mean for the mean that smoothing took from k, 0 without
  // With zero points of q or k: that of q, and the sum of its codes minus it.
  int32_t zero[kMaxBlockRows], sum[kMaxBlockRows];
};

// Prepares `count` rows of q from `token` on, `valid` of them in the sequence: A words, `stride` apart.
template <class Qk>
void pack_queries(const Problem& p, const ForwardNumerics& numerics, const Sequence& seq, int64_t h, int64_t token,
                  int64_t valid, int64_t count, const Signs& signs, const float* k_mean, Word* q, int64_t stride,
                  int64_t words, QueryRows& found) {
  alignas(64) float buffer[kMaxBlockRows * kMaxDim];
  const int64_t width = padded<Qk>(padded_columns(p.dim));
  const bool in_place = std::is_same_v<Qk, F32> && words == width && stride == width;  // words are floats
  float* rows = in_place ? reinterpret_cast<float*>(q) : buffer;
  float(&scales)[kMaxBlockRows] = found.scale;
  for (int64_t r = 0; r < count; ++r) scales[r] = 1.f;
  if (in_bytes<Qk>(numerics.qk) && numerics.q_group == 1 && !numerics.q_prequantized) {
    alignas(64) double mean[kMaxDim] = {};
    for (int64_t c = 0; c < p.dim && k_mean; ++c) mean[c] = k_mean[c];
    for (int64_t r = 0; r < valid; ++r)
      scales[r] =
          divisible(int8_row(p.q, seq.batch, h, seq.q_first + token + r, nullptr,
                             numerics.hadamard ? signs.sign : nullptr, k_mean ? mean : nullptr, found.mean_logit + r,
                             kBias<Qk>, words * Qk::kPerWord, reinterpret_cast<uint8_t*>(q + r * stride)));
    for (int64_t r = valid; r < count; ++r) std::memset(q + r * stride, kBias<Qk>, words * sizeof(Word));
    return;
  }
  if (numerics.q_group == 1 && !numerics.q_prequantized) {
    if (k_mean) {
      load_numbers(p.q, seq.batch, h, seq.q_first + token, valid, valid, width, rows);
      mean_logits(p, numerics, rows, valid, width, signs, k_mean, nullptr, found.mean_logit);
    }
    for (int64_t r = 0; r < valid; ++r)
      scales[r] = quantize_row(p.q, seq.batch, h, seq.q_first + token + r, numerics.qk, nullptr,
                               numerics.hadamard ? signs.sign : nullptr, width, rows + r * width);
    std::memset(rows + valid * width, 0, sizeof(float) * static_cast<std::size_t>((count - valid) * width));
  } else {
    load_operand(p.q, numerics.q_prequantized, seq.batch, h, seq.q_first + token, valid, count, width, rows);
    const int32_t* zero = numerics.qk_zero_points ? found.zero : nullptr;
    if (zero) {
      std::fill_n(found.zero, count, 0), std::fill_n(found.sum, count, 0);
      load_zero_points(p.q, seq.batch, h, seq.q_first + token, valid, found.zero);
      for (int64_t r = 0; r < valid; ++r)
        found.sum[r] = sum_of_codes(rows + r * width, p.dim) - found.zero[r] * static_cast<int32_t>(p.dim);
    }
    if (k_mean) mean_logits(p, numerics, rows, valid, width, signs, k_mean, zero, found.mean_logit);
    for (int64_t r = 0; r < valid && numerics.hadamard && !numerics.q_prequantized; ++r)
      hadamard_row(rows + r * width, signs.sign, p.dim);
    if (numerics.q_prequantized) {
      for (int64_t r = 0; r < valid; ++r) {
        scales[r] = prequantized_scale(p.q, seq.batch, h, seq.q_first + token + r);
        if (k_mean) found.mean_logit[r] *= scales[r];
      }
    } else if (numerics.q_group == 0) {
      quantize_rows(numerics.qk, numerics.hadamard ? OCTET_F32 : numbers_of(p.q), 0, rows, valid, width, scales);
    } else {
      Scale scale{};
      for (int64_t r = 0; r < valid; ++r) {
        const int64_t first = (token + r) / numerics.q_group * numerics.q_group;
        if (r == 0 || first == token + r)
          scale = scale_of(group_amax(p, seq, h, first, numerics.q_group), largest_quantized(numerics.qk));
        scales[r] = row_amax(rows + r * width, width) < __builtin_inff() ? scale.scale : __builtin_nanf("");
        round_row_to(numerics.qk, scale.inverse, rows + r * width, width);
      }
    }
  }
  for (int64_t r = 0; r < valid; ++r) scales[r] = divisible(scales[r]);
#ifdef __AMX_BF16__
  if constexpr (kSplits<Qk>) {
    for (int64_t r = 0; r < count; ++r) split_row(rows + r * width, width, width / 2, q + r * stride);
    return;
  }
#endif
  for (int64_t r = 0; r < count && !in_place; ++r)
    encode_row<Qk>(rows + r * width, words * Qk::kPerWord, kBias<Qk>, q + r * stride);
}

}  // namespace octet::cpu::OCTET_ISA
