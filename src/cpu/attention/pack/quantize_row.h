// One row of q, k or v from the caller's tensor to quantized values with a scale of its own, in registers from end to
// end. The operations and their order are those of the public quantizers (cpu/quantize/quantize.cc): the same bits.
#pragma once
#include "cpu/attention/pack/numbers.h"
#include "cpu/attention/pack/round.h"

namespace octet::cpu::OCTET_ISA {

OCTET_INLINE void subtract(Vf* x, int n, const float* mean) {
  for (int v = 0; v < n; ++v) x[v] -= load(mean + v * kLanes);
}

// One stage of Hadamard butterflies, within vectors and between them.
template <int half>
OCTET_INLINE Vf butterfly(Vf x) {
  const Vf sign = (iota() & half) != 0 ? splat(-1.f) : splat(1.f);
  return exchange<half>(x) + x * sign;  // exact, fused or not
}
template <int half>
OCTET_INLINE void butterflies(Vf* x, int n) {
  if constexpr (half < kLanes) {
    for (int v = 0; v < n; ++v) x[v] = butterfly<half>(x[v]);
  } else {
    constexpr int distance = half / kLanes;
    for (int v = 0; v < n; ++v) {
      if (v & distance) continue;
      const Vf a = x[v], b = x[v + distance];
      x[v] = a + b;
      x[v + distance] = a - b;
    }
  }
}

// octet::hadamard: the same operations in the same order.
OCTET_INLINE void hadamard(Vf* x, int n, const float* signs, int64_t dim) {
  const int64_t block = hadamard_block(dim);
  for (int v = 0; v < n; ++v) x[v] *= load(signs + v * kLanes);
  if (block > 1) butterflies<1>(x, n);
  if (block > 2) butterflies<2>(x, n);
  if (block > 4) butterflies<4>(x, n);
  if (block > 8) butterflies<8>(x, n);
  if (block > 16) butterflies<16>(x, n);
  if (block > 32) butterflies<32>(x, n);
  if (block > 64) butterflies<64>(x, n);
  if (block > 128) butterflies<128>(x, n);
  if (block > 256) butterflies<256>(x, n);
  static_assert(kMaxDim <= 512);
  const float norm = 1.f / __builtin_sqrtf(static_cast<float>(block));
  for (int v = 0; v < n; ++v) x[v] *= norm;
}

// octet::amax: NaN lies above infinity.
OCTET_INLINE float amax(const Vf* x, int n) {
  Vi largest = bits(x[0]) & 0x7fffffff;
  for (int v = 1; v < n; ++v) largest = max(bits(x[v]) & 0x7fffffff, largest);
  const int32_t top = reduce_max(largest);
  float amax;
  std::memcpy(&amax, &top, sizeof amax);
  return amax;
}

constexpr float largest_quantized(octet_dtype dtype) { return dtype == OCTET_I8 ? 127.f : 448.f; }

// The integer nearest to x / scale, ties to even; `inverse`: 1 / scale. 0 for NaN.
OCTET_INLINE Vf round_int8(Vf x, float inverse) {
  const Vf magic = splat(0x1.8p23f), y = x * inverse;
  // The bounds also keep the product out of a fused add.
  const Vf bounded = max(splat(-127.f), min(splat(127.f), y == y ? y : Vf{}));
  return (bounded + magic) - magic;
}

// Rounds a row to quantized values; returns their scale. A row that is not finite becomes zeros with the scale NaN.
OCTET_INLINE float quantize(octet_dtype dtype, Vf* x, int n) {
  const float largest = amax(x, n);
  if (!(largest < __builtin_inff())) {
    for (int v = 0; v < n; ++v) x[v] = Vf{};
    return __builtin_nanf("");
  }
  const Scale scale = scale_of(largest, largest_quantized(dtype));
  if (dtype == OCTET_I8) {
    for (int v = 0; v < n; ++v) x[v] = round_int8(x[v], scale.inverse);
  } else {
    for (int v = 0; v < n; ++v) x[v] = round_e4m3(x[v] * scale.inverse);
  }
  return scale.scale;
}

// Loads a row, removes `mean` and rotates with `signs` unless they are null, and rounds it to quantized
// values, as floats, in out; returns their scale. `width`: of out, a multiple of kLanes.
inline float quantize_row(const View& t, int64_t b, int64_t h, int64_t token, octet_dtype dtype, const float* mean,
                          const float* signs, int64_t width, float* out) {
  float scale = 0.f;
  with_vectors(t.shape[3], [&](int n) OCTET_INLINE_LAMBDA {
    RowVectors x;
    load_numbers_row(t, b, h, token, x, n);
    if (mean) subtract(x, n, mean);
    if (signs) hadamard(x, n, signs, t.shape[3]);
    scale = quantize(dtype, x, n);
    for (int v = 0; v < n; ++v)
      if (v * kLanes < width) store(out + v * kLanes, x[v]);
    for (int64_t c = n * kLanes; c < width; c += kLanes) store(out + c, Vf{});
  });
  return scale;
}

}  // namespace octet::cpu::OCTET_ISA
