// Rows of the caller's tensors to words of int8 values with a scale for each, in bytes all the way, for engines that
// take four of them in a word.
#pragma once
#include "cpu/attention/job.h"
#include "cpu/attention/pack/quantize_row.h"
#include "cpu/attention/pack/rows.h"
#include "cpu/gemm/matmul.h"

namespace octet::cpu::OCTET_ISA {

// Returns whether an operand of engine E is packed from int8 in bytes all the way, as this file does.
template <class E>
constexpr bool in_bytes(octet_dtype dtype) {
  return std::is_same_v<typename E::Element, uint8_t> && dtype == OCTET_I8;
}

// quantize_row to int8 plus `bias`, as bytes. With `against`, [kMaxDim] or null, also the product of that and the row
// as it came.
inline float int8_row(const View& t, int64_t b, int64_t h, int64_t token, const float* mean, const float* signs,
                      const double* against, double* product, int bias, int64_t width, uint8_t* out) {
  Scale scale;
  with_vectors(t.shape[3], [&](int n) OCTET_INLINE_LAMBDA {
    RowVectors x;
    load_numbers_row(t, b, h, token, x, n);
    if (against) *product = dot_in_double(x, n, against);
    if (mean) subtract(x, n, mean);
    if (signs) hadamard(x, n, signs, t.shape[3]);
    const float largest = amax(x, n);
    const bool finite = largest < __builtin_inff();
    scale = finite ? scale_of(largest, largest_quantized(OCTET_I8)) : Scale{__builtin_nanf(""), 0.f};
    for (int v = 0; v < n; ++v)
      if (v * kLanes < width) store_bytes(out + v * kLanes, nearest(finite ? x[v] * scale.inverse : Vf{}) + bias);
    if (n * kLanes < width) std::memset(out + n * kLanes, bias, static_cast<std::size_t>(width - n * kLanes));
  });
  return scale.scale;
}

// A tile of k: [k_words][kKeys]. `correction`: where engines with a bias want theirs.
template <class Qk>
void pack_int8_keys(const View& t, int64_t b, int64_t g, int64_t token, int64_t valid, const float* mean,
                    const float* signs, int64_t k_words, Word* k, int32_t* correction, float* scales) {
  alignas(64) uint8_t bytes[kKeys * (kMaxDim + 64)] = {};
  const int64_t width = k_words * 4;
  for (int64_t r = 0; r < valid; ++r) {
    uint8_t* row = bytes + r * width;
    scales[r] = int8_row(t, b, g, token + r, mean, signs, nullptr, nullptr, 0, width, row);
  }
  for (int64_t r = 0; r < kKeys && kBias<Qk>; ++r) {
    int32_t sum = 0;
    for (int64_t c = 0; c < t.shape[3]; ++c) sum += static_cast<int8_t>(bytes[r * width + c]);
    correction[r] = -kBias<Qk> * sum;
  }
  transpose(reinterpret_cast<const float*>(bytes), kKeys, k_words, k_words, reinterpret_cast<float*>(k));
}

// A tile of v: [kKeys / 4][columns].
inline void pack_int8_values(const View& t, int64_t b, int64_t g, int64_t token, int64_t valid, const float* mean,
                             int64_t columns, Word* v, float* scales) {
  alignas(64) uint8_t bytes[kKeys * kMaxDim];
  for (int64_t r = 0; r < valid; ++r)
    scales[r] = int8_row(t, b, g, token + r, mean, nullptr, nullptr, nullptr, 0, columns, bytes + r * columns);
  std::memset(bytes + valid * columns, 0, static_cast<std::size_t>((kKeys - valid) * columns));
  for (int64_t r = 0; r < kKeys; r += 4)
    for (int64_t c = 0; c < columns; c += kLanes) {
      const auto row = [&](int64_t i) OCTET_INLINE_LAMBDA { return load_bytes(bytes + (r + i) * columns + c); };
      store(reinterpret_cast<int32_t*>(v + r / 4 * columns + c), row(0) | row(1) << 8 | row(2) << 16 | row(3) << 24);
    }
}

}  // namespace octet::cpu::OCTET_ISA
