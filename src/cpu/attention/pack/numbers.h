// The numbers that rows of the caller's tensors stand for: as floats in memory, or one row in vectors.
#pragma once
#include "core/quant/thread_groups.h"
#include "cpu/attention/pack/elements.h"

namespace octet::cpu::OCTET_ISA {

constexpr int64_t kMaxDim = kMostHeadDim;

OCTET_INLINE const float* parameter_at(const octet_tensor& x, int64_t b, int64_t h, int64_t group, int64_t c) {
  return static_cast<const float*>(x.data) + b * x.stride[0] + h * x.stride[1] + group * x.stride[2] + c * x.stride[3];
}

// The group of `token` along tokens; see octet_granularity.
OCTET_INLINE int64_t group_of(const octet_quantization& how, int64_t token) {
  switch (how.granularity) {
    case OCTET_PER_TOKEN:
      return token;
    case OCTET_PER_BLOCK:
      return token / how.block;
    case OCTET_PER_THREAD:
      return how.operand == OCTET_OPERAND_Q ? thread_group_q(token) : thread_group_k(token);
    default:
      return 0;
  }
}

// Codes are taken as signed bytes, so uint8 and its zero points are 128 less.
constexpr float code_offset(octet_dtype dtype) { return dtype == OCTET_U8 ? 128.f : 0.f; }

// The zero point of a token among such codes; 0 without one.
OCTET_INLINE float prequantized_zero_point(const View& t, int64_t sequence, int64_t h, int64_t number) {
  const octet_quantization* how = t.quantization;
  const auto [b, token] = t.place(sequence, number);
  const bool has = how && how->zero_point_kind == OCTET_ZERO_POINT_INTEGER;
  return (has ? *parameter_at(*how->zero_point, b, h, group_of(*how, token), 0) : 0.f) - code_offset(t.dtype);
}

// Returns whether a zero point is a code itself. Only then are sums of products exact.
inline bool is_code(float zero_point) {
  return zero_point >= -128.f && zero_point <= 127.f && nearest_even(zero_point) == zero_point;
}

// Scale of a token of a tensor that came quantized; 1 without a quantization, NaN where the zero point is no code.
OCTET_INLINE float prequantized_scale(const View& t, int64_t b, int64_t h, int64_t token) {
  if (!t.quantization) return 1.f;
  if (!is_code(prequantized_zero_point(t, b, h, token))) return __builtin_nanf("");
  const auto [element, at] = t.place(b, token);
  return *parameter_at(*t.quantization->scale, element, h, group_of(*t.quantization, at), 0);
}

inline int32_t sum_of_codes(const float* codes, int64_t n) {
  int32_t sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += static_cast<int32_t>(codes[c]);
  return sum;
}

// Zero points of `count` tokens from `token` on.
inline void load_zero_points(const View& t, int64_t b, int64_t h, int64_t token, int64_t count, int32_t* out) {
  for (int64_t r = 0; r < count; ++r) {
    const float zero_point = prequantized_zero_point(t, b, h, token + r);
    out[r] = is_code(zero_point) ? static_cast<int32_t>(zero_point) : 0;
  }
}

OCTET_INLINE float prequantized_mean(const View& t, int64_t b, int64_t h, int64_t c) {
  return t.quantization && t.quantization->mean ? *parameter_at(*t.quantization->mean, b, h, 0, c) : 0.f;
}

// Rows of a tile or block: [count][width] floats from `token` on, rows past `tokens` zero.
inline void load_rows(const View& t, int64_t b, int64_t h, int64_t token, int64_t valid, int64_t count, int64_t width,
                      float* rows) {
  for (int64_t r = 0; r < count; ++r) {
    float* row = rows + r * width;
    if (r < valid) load_row(t, b, h, token + r, row);
    for (int64_t c = r < valid ? t.shape[3] : 0; c < width; ++c) row[c] = 0.f;
  }
}

// The numbers that `count` rows of quantized values stand for (octet_quantization): scale and zero point, rotation,
// mean.
inline void dequantize_rows(const View& t, int64_t b, int64_t h, int64_t token, int64_t count, int64_t width,
                            float* rows) {
  const octet_quantization& how = *t.quantization;
  const int64_t n = t.shape[3];
  float signs[kMaxDim];
  for (int64_t c = 0; c < n; ++c) signs[c] = hadamard_sign(how.hadamard_seed, c);
  for (int64_t r = 0; r < count; ++r) {
    float* row = rows + r * width;
    const auto [element, at] = t.place(b, token + r);
    const auto parameter = [&, element = element](const octet_tensor& x, int64_t group, int64_t c) {
      return *parameter_at(x, element, h, group, c);
    };
    const int64_t group = group_of(how, at);
    for (int64_t c = 0; c < n; ++c) {
      const int64_t channel = how.granularity == OCTET_PER_CHANNEL ? c : 0;
      const float scale = parameter(*how.scale, group, channel);
      const float zero_point =
          how.zero_point_kind == OCTET_SYMMETRIC ? 0.f : parameter(*how.zero_point, group, channel);
      row[c] =
          how.zero_point_kind == OCTET_ZERO_POINT_FLOAT ? scale * row[c] + zero_point : scale * (row[c] - zero_point);
    }
    if (how.hadamard_seed) hadamard_inverse(row, signs, n);
    if (how.mean)
      for (int64_t c = 0; c < n; ++c) row[c] += parameter(*how.mean, 0, c);
  }
}

// `valid` tokens as numbers, then zeros up to `count`.
inline void load_numbers(const View& t, int64_t b, int64_t h, int64_t token, int64_t valid, int64_t count,
                         int64_t width, float* rows) {
  load_rows(t, b, h, token, valid, count, width, rows);
  if (t.quantization) dequantize_rows(t, b, h, token, valid, width, rows);
}

// A row of `dim` numbers as vectors, zero past its end. Calls body with their number: where a row may stay in
// registers, one of few constants that loops are unrolled for.
template <class Body>
OCTET_INLINE void with_vectors(int64_t dim, Body&& body) {
  if constexpr (kLanes < 16) return body(static_cast<int>((dim + kLanes - 1) / kLanes));
  if (dim <= 64) return body(64 / kLanes);
  if (dim <= 128) return body(128 / kLanes);
  return body(static_cast<int>(kMaxDim) / kLanes);
}
typedef Vf RowVectors[kMaxDim / kLanes];

// False, with nothing done, unless the row is dense, whole vectors of a 16- or 32-bit type.
OCTET_INLINE bool load_dense_row(const View& t, int64_t b, int64_t h, int64_t token, Vf* x, int n) {
  if (t.stride[3] != 1 || t.shape[3] != n * kLanes || t.quantization) return false;
  const void* p = row_pointer(t, b, h, token);
  prefetch_row(t, p, 16);
  switch (t.dtype) {
    case OCTET_F32:
      for (int v = 0; v < n; ++v) x[v] = load(static_cast<const float*>(p) + v * kLanes);
      return true;
    case OCTET_BF16:
      for (int v = 0; v < n; ++v) x[v] = load_bf16(static_cast<const uint16_t*>(p) + v * kLanes);
      return true;
    case OCTET_F16:
      for (int v = 0; v < n; ++v) x[v] = load_f16(static_cast<const uint16_t*>(p) + v * kLanes);
      return true;
    default:
      return false;
  }
}

// A row of numbers, or of quantized values as they are, in vectors.
OCTET_INLINE void load_numbers_row(const View& t, int64_t b, int64_t h, int64_t token, Vf* x, int n) {
  if (load_dense_row(t, b, h, token, x, n)) return;
  alignas(64) float row[kMaxDim];
  load_numbers(t, b, h, token, 1, 1, n * kLanes, row);
  for (int v = 0; v < n; ++v) x[v] = load(row + v * kLanes);
}

// The type whose numbers load_numbers gives.
inline octet_dtype numbers_of(const View& t) { return t.quantization ? OCTET_F32 : t.dtype; }

// Codes as signed bytes, or the numbers of anything else.
inline void load_operand(const View& t, bool prequantized, int64_t b, int64_t h, int64_t token, int64_t valid,
                         int64_t count, int64_t width, float* rows) {
  if (!prequantized) return load_numbers(t, b, h, token, valid, count, width, rows);
  load_rows(t, b, h, token, valid, count, width, rows);
  if (const float offset = code_offset(t.dtype); offset != 0.f)
    for (int64_t r = 0; r < valid; ++r)
      for (int64_t c = 0; c < t.shape[3]; ++c) rows[r * width + c] -= offset;
}

}  // namespace octet::cpu::OCTET_ISA
