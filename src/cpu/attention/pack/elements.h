// Rows of tensors in the caller's memory to and from floats.
#pragma once
#include "core/o_residual.h"
#include "core/problem.h"
#include "core/quant/hadamard.h"
#include "core/quant/scale.h"
#include "cpu/gemm/simd.h"

namespace octet::cpu::OCTET_ISA {

OCTET_INLINE float from_bf16(uint16_t x) {
  const uint32_t i = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &i, 4);
  return f;
}

OCTET_INLINE uint16_t to_bf16(float x) {
  uint32_t i;
  std::memcpy(&i, &x, 4);
  if (x != x) return static_cast<uint16_t>(i >> 16 | 0x40);
  return static_cast<uint16_t>((i + 0x7fff + (i >> 16 & 1)) >> 16);
}

// Numbers of `mantissa` bits and an exponent of bias 15 (f16) or 7 (e4m3), by scaling the exponent field.
OCTET_INLINE float from_f16(uint16_t x) {
  const uint32_t magnitude = x & 0x7fffu, sign = static_cast<uint32_t>(x & 0x8000u) << 16;
  uint32_t i = magnitude << 13;
  float f;
  if (magnitude >= 0x7c00u) {
    i |= 0x7f800000u;
    std::memcpy(&f, &i, 4);
  } else {
    std::memcpy(&f, &i, 4);
    f *= 0x1p112f;
  }
  uint32_t out;
  std::memcpy(&out, &f, 4);
  out |= sign;
  std::memcpy(&f, &out, 4);
  return f;
}

OCTET_INLINE Vf load_f16(const uint16_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vf x;
  for (int i = 0; i < kLanes; ++i) x[i] = from_f16(p[i]);
  return x;
#endif
}

OCTET_INLINE uint16_t to_f16(float x) {
  uint32_t i;
  std::memcpy(&i, &x, 4);
  const uint16_t sign = static_cast<uint16_t>(i >> 16 & 0x8000u);
  i &= 0x7fffffffu;
  if (i > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (i >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (i >= 0x38800000u) return static_cast<uint16_t>(sign | ((i + 0xfff + (i >> 13 & 1) - 0x38000000u) >> 13));
  float f;
  std::memcpy(&f, &i, 4);
  f += 0x1.8p-1f;  // units of 2^-24
  std::memcpy(&i, &f, 4);
  return static_cast<uint16_t>(sign | (i & 0x7ffu));
}

OCTET_INLINE float from_e4m3(uint8_t x) {
  const uint32_t magnitude = x & 0x7fu, sign = static_cast<uint32_t>(x & 0x80u) << 24;
  uint32_t i = magnitude << 20;
  float f;
  std::memcpy(&f, &i, 4);
  f *= 0x1p120f;
  std::memcpy(&i, &f, 4);
  i |= sign;
  if (magnitude == 0x7fu) i |= 0x7fc00000u;
  std::memcpy(&f, &i, 4);
  return f;
}

// Saturates at 448.
OCTET_INLINE uint8_t to_e4m3(float x) {
  uint32_t i;
  std::memcpy(&i, &x, 4);
  const uint8_t sign = static_cast<uint8_t>(i >> 24 & 0x80u);
  i &= 0x7fffffffu;
  if (i > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (i >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);
  if (i >= 0x3c800000u) return static_cast<uint8_t>(sign | ((i + 0x7ffff + (i >> 20 & 1) - 0x3c000000u) >> 20));
  float f;
  std::memcpy(&f, &i, 4);
  f += 0x1.8p14f;  // units of 2^-9
  std::memcpy(&i, &f, 4);
  return static_cast<uint8_t>(sign | (i & 0xfu));
}

template <class T, class Convert>
OCTET_INLINE void convert_row(const void* base, int64_t stride, int64_t n, float* out, Convert convert) {
  const T* p = static_cast<const T*>(base);
  if (stride == 1) {
    for (int64_t c = 0; c < n; ++c) out[c] = convert(p[c]);
  } else {
    for (int64_t c = 0; c < n; ++c) out[c] = convert(p[c * stride]);
  }
}

OCTET_INLINE const void* row_pointer(const View& t, int64_t b, int64_t h, int64_t token) {
  static constexpr int64_t kBytes[] = {0, 8, 4, 2, 2, 1, 1, 1, 1, 1, 4, 1};
  return static_cast<const char*>(t.data) + t.offset(b, h, token) * kBytes[t.dtype];
}

// Asks for the row that is `ahead` tokens further on, where rows lie close together: hardware notices a stream of them
// too late.
OCTET_INLINE void prefetch_row(const View& t, const void* row, int64_t ahead) {
  static constexpr int64_t kBytes[] = {0, 8, 4, 2, 2, 1, 1, 1, 1, 1, 4, 1};
  const int64_t bytes = kBytes[t.dtype];
  // Addresses are computed as integers: where there are no such tokens, no pointer goes as far as the strides may.
  const uint64_t at = reinterpret_cast<uintptr_t>(row) + static_cast<uint64_t>(ahead * bytes) * t.stride[2];
  for (int64_t i = 0; i < t.shape[3] * bytes; i += 64) __builtin_prefetch(reinterpret_cast<const char*>(at + i));
}

// Asks for rows that will be read, or written, much later.
template <bool write>
OCTET_INLINE void prefetch_rows(const View& t, int64_t b, int64_t h, int64_t token, int64_t count) {
  static constexpr int64_t kBytes[] = {0, 8, 4, 2, 2, 1, 1, 1, 1, 1, 4, 1};
  for (int64_t i = token; i < token + count; ++i) {
    const char* p = static_cast<const char*>(row_pointer(t, b, h, i));
    for (int64_t at = 0; at < t.shape[3] * kBytes[t.dtype]; at += 64) __builtin_prefetch(p + at, write, 2);
  }
}

// Quantized values come out as numbers, in the frame of their quantization (rotated, mean removed).
static inline void load_row(const View& t, int64_t b, int64_t h, int64_t token, float* out) {
  const void* p = row_pointer(t, b, h, token);
  const int64_t n = t.shape[3], stride = t.stride[3];
  prefetch_row(t, p, 16);
  switch (t.dtype) {
    case OCTET_F64:
      return convert_row<double>(p, stride, n, out, [](double x) { return static_cast<float>(x); });
    case OCTET_F32:
      return convert_row<float>(p, stride, n, out, [](float x) { return x; });
    case OCTET_F16:
      return convert_row<uint16_t>(p, stride, n, out, [](uint16_t x) { return from_f16(x); });
    case OCTET_BF16:
      return convert_row<uint16_t>(p, stride, n, out, [](uint16_t x) { return from_bf16(x); });
    case OCTET_E4M3:
      return convert_row<uint8_t>(p, stride, n, out, [](uint8_t x) { return from_e4m3(x); });
    case OCTET_U8:
      return convert_row<uint8_t>(p, stride, n, out, [](uint8_t x) { return static_cast<float>(x); });
    default:
      return convert_row<int8_t>(p, stride, n, out, [](int8_t x) { return static_cast<float>(x); });
  }
}

static inline void store_row(const View& t, int64_t b, int64_t h, int64_t token, const float* x) {
  void* p = const_cast<void*>(row_pointer(t, b, h, token));
  const int64_t n = t.shape[3], stride = t.stride[3];
  switch (t.dtype) {
    case OCTET_F32:
      if (stride == 1)
        std::memcpy(p, x, sizeof(float) * n);
      else
        for (int64_t c = 0; c < n; ++c) static_cast<float*>(p)[c * stride] = x[c];
      return;
    case OCTET_F16:
      for (int64_t c = 0; c < n; ++c) static_cast<uint16_t*>(p)[c * stride] = to_f16(x[c]);
      return;
    case OCTET_BF16:
      if (stride == 1) {
        for (int64_t c = 0; c < n; ++c) static_cast<uint16_t*>(p)[c] = to_bf16(x[c]);
      } else {
        for (int64_t c = 0; c < n; ++c) static_cast<uint16_t*>(p)[c * stride] = to_bf16(x[c]);
      }
      return;
    default:
      for (int64_t c = 0; c < n; ++c) static_cast<uint8_t*>(p)[c * stride] = to_e4m3(x[c]);
      return;
  }
}

// x rounded to the dtype that store_row writes.
static inline void round_row(octet_dtype dtype, float* x, int64_t n) {
  switch (dtype) {
    case OCTET_F16:
      for (int64_t c = 0; c < n; ++c) x[c] = from_f16(to_f16(x[c]));
      return;
    case OCTET_BF16:
      for (int64_t c = 0; c < n; ++c) x[c] = from_bf16(to_bf16(x[c]));
      return;
    case OCTET_E4M3:
      for (int64_t c = 0; c < n; ++c) x[c] = from_e4m3(to_e4m3(x[c]));
      return;
    default:
      return;
  }
}

// Stores what x lost when it was rounded to `rounded`, a row of an o of type `o`.
static inline void store_residual(const View& t, int64_t b, int64_t h, int64_t token, octet_dtype o, const float* x,
                                  float* rounded) {
  const int64_t n = t.shape[3];
  if (t.dtype != OCTET_I8) {
    for (int64_t c = 0; c < n; ++c) rounded[c] = x[c] - rounded[c];
    return store_row(t, b, h, token, rounded);
  }
  auto* const to = static_cast<int8_t*>(const_cast<void*>(row_pointer(t, b, h, token)));
  const int shift = residual_shift(o);
  for (int64_t c = 0; c < n; ++c) to[c * t.stride[3]] = residual_of(x[c], rounded[c], shift);
}

// Adds to o, a row of type `type`, what it lost when it was rounded.
static inline void add_residual(const View& t, int64_t b, int64_t h, int64_t token, octet_dtype type, float* o) {
  float residual[kMostHeadDim];
  load_row(t, b, h, token, residual);
  const int shift = residual_shift(type);
  for (int64_t c = 0; c < t.shape[3]; ++c)
    o[c] = t.dtype == OCTET_I8 ? with_residual(o[c], static_cast<int8_t>(residual[c]), shift) : o[c] + residual[c];
}

}  // namespace octet::cpu::OCTET_ISA
