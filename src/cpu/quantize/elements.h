// Rows of numbers of any type to and from float.
#pragma once
#include <array>

#include "core/problem.h"
#include "core/quant/elements.h"

namespace octet {

static inline void encode_e4m3(const float* x, int64_t n, uint8_t* out) {
  for (int64_t c = 0; c < n; ++c) out[c] = e4m3_bits(x[c]);
}
static inline void encode_e5m2(const float* x, int64_t n, uint8_t* out) {
  for (int64_t c = 0; c < n; ++c) out[c] = e5m2_bits(x[c]);
}

// The numbers that the 256 bytes of an 8-bit dtype stand for.
static inline std::array<float, 256> decode_table(octet_dtype dtype) {
  std::array<float, 256> values;
  for (int i = 0; i < 256; ++i) values[i] = byte_value(dtype, static_cast<uint8_t>(i));
  return values;
}

namespace detail {

// Applies `convert` to the elements of a row. The contiguous loop is apart, because it vectorises.
template <class From, class To, class Convert>
static inline void convert_row(const From* from, int64_t from_stride, To* to, int64_t to_stride, int64_t n,
                               Convert convert) {
  if (from_stride == 1 && to_stride == 1)
    for (int64_t c = 0; c < n; ++c) to[c] = convert(from[c]);
  else
    for (int64_t c = 0; c < n; ++c) to[c * to_stride] = convert(from[c * from_stride]);
}

}  // namespace detail

// row[c] = x[b, h, t, c], for floating-point x; T is float or double.
template <class T>
static inline void load_row(const View& x, int64_t b, int64_t h, int64_t t, T* row) {
  const auto from = [&](const auto* data, auto convert) {
    detail::convert_row(data + x.offset(b, h, t), x.stride[3], row, 1, x.shape[3], convert);
  };
  switch (x.dtype) {
    case OCTET_F64:
      return from(static_cast<const double*>(x.data), [](double v) { return static_cast<T>(v); });
    case OCTET_F32:
      return from(static_cast<const float*>(x.data), [](float v) { return static_cast<T>(v); });
    case OCTET_F16:
      return from(static_cast<const uint16_t*>(x.data), [](uint16_t v) { return static_cast<T>(f16_value(v)); });
    case OCTET_BF16:
      return from(static_cast<const uint16_t*>(x.data), [](uint16_t v) { return static_cast<T>(bf16_value(v)); });
    default: {
      static const std::array<float, 256> values = decode_table(OCTET_E4M3);
      return from(static_cast<const uint8_t*>(x.data), [](uint8_t v) { return static_cast<T>(values[v]); });
    }
  }
}

// x[b, h, t, c] = row[c], rounded to f64, f32, f16 or bf16.
template <class T>
static inline void store_row(const T* row, const View& x, int64_t b, int64_t h, int64_t t) {
  const auto to = [&](auto* data, auto convert) {
    detail::convert_row(row, 1, data + x.offset(b, h, t), x.stride[3], x.shape[3], convert);
  };
  switch (x.dtype) {
    case OCTET_F64:
      return to(static_cast<double*>(x.data), [](T v) { return static_cast<double>(v); });
    case OCTET_F32:
      return to(static_cast<float*>(x.data), [](T v) { return static_cast<float>(v); });
    case OCTET_F16:
      return to(static_cast<uint16_t*>(x.data), [](T v) { return f16_bits(static_cast<float>(v)); });
    default:
      return to(static_cast<uint16_t*>(x.data), [](T v) { return bf16_bits(static_cast<float>(v)); });
  }
}

}  // namespace octet
