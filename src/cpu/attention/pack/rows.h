// Operations on rows of floats in memory, on their way to operands: rotation, rounding, largest magnitudes,
// transposition.
#pragma once
#include "cpu/attention/job.h"
#include "cpu/attention/pack/quantize_row.h"
#include "cpu/gemm/matmul.h"

namespace octet::cpu::OCTET_ISA {

// Signs of the Hadamard rotation of q and k: those of q if it came quantized.
struct Signs {
  float sign[kMaxDim];
  Signs(const View& q, int64_t dim) : Signs(q.quantization ? q.quantization->hadamard_seed : kHadamardSeed, dim) {}
  Signs(uint64_t seed, int64_t dim) {
    for (int64_t c = 0; c < kMaxDim; ++c) sign[c] = c < dim ? hadamard_sign(seed, c) : 0.f;
  }
};

// [padded_columns(dim)] numbers.
inline void hadamard_row(float* x, const float* signs, int64_t dim) {
  with_vectors(dim, [&](int n) OCTET_INLINE_LAMBDA {
    const int count = static_cast<int>(padded_columns(dim)) / kLanes;
    RowVectors y;
    for (int v = 0; v < n; ++v) y[v] = v < count ? load(x + v * kLanes) : Vf{};
    hadamard(y, n, signs, dim);
    for (int v = 0; v < count; ++v) store(x + v * kLanes, y[v]);
  });
}

// octet::amax; n a multiple of kLanes.
OCTET_INLINE float row_amax(const float* x, int64_t n) {
  Vi largest{};
  for (int64_t c = 0; c < n; c += kLanes) largest = max(bits(load(x + c)) & 0x7fffffff, largest);
  const int32_t top = reduce_max(largest);
  float amax;
  std::memcpy(&amax, &top, sizeof amax);
  return amax;
}

OCTET_INLINE Vf finite_magnitude(Vf x) {
  const Vf a = floats(bits(x) & 0x7fffffff);
  return a < splat(__builtin_inff()) ? a : Vf{};
}

inline float finite_amax(const float* x, int64_t n) {
  Vf largest{};
  for (int64_t c = 0; c < n; c += kLanes) largest = max(finite_magnitude(load(x + c)), largest);
  return reduce_max(largest);
}

inline void subtract(float* row, const float* mean, int64_t n) {
  for (int64_t c = 0; c < n; ++c) row[c] -= mean[c];
}
inline void add(float* row, const float* mean, int64_t n) {
  for (int64_t c = 0; c < n; ++c) row[c] += mean[c];
}

// Rounds x, or x / scale where there is a scale, to the numbers of a format; `inverse`: 1 / scale.
static inline void round_row_to(octet_dtype dtype, float inverse, float* x, int64_t n) {
  for (int64_t c = 0; c < n; c += kLanes) {
    const Vf y = load(x + c);
    switch (dtype) {
      case OCTET_I8:
        store(x + c, round_int8(y, inverse));
        break;
      case OCTET_E4M3:
        store(x + c, round_e4m3(y * inverse));
        break;
      case OCTET_F16:
        store(x + c, round_f16(y * inverse));
        break;
      case OCTET_BF16:
        store(x + c, round_bf16(y * inverse));
        break;
      default:
        store(x + c, y * inverse);
        break;
    }
  }
}

// Rounds `valid` rows of a tile to `dtype`, with a scale in `scales` for each `group` of them (0: none; or
// kThreadGroups). A row that is not finite gets the scale NaN and does not count for its group. `came`: the type that
// the numbers have already.
inline void quantize_rows(octet_dtype dtype, octet_dtype came, int64_t group, float* rows, int64_t valid, int64_t width,
                          float* scales) {
  if (!group) {
    if (dtype == OCTET_F32 || dtype == came) return;
    for (int64_t r = 0; r < valid; ++r) round_row_to(dtype, 1.f, rows + r * width, width);
    return;
  }
  const auto group_of = [&](int64_t r) { return group == kThreadGroups ? thread_group_k(r) : r / group; };
  float largest[kKeys] = {};
  for (int64_t r = 0; r < valid; ++r) {
    scales[r] = row_amax(rows + r * width, width);
    float& of_group = largest[group_of(r)];
    of_group = scales[r] > of_group && scales[r] < __builtin_inff() ? scales[r] : of_group;
  }
  for (int64_t r = 0; r < valid; ++r) {
    const Scale scale = scale_of(largest[group_of(r)], largest_quantized(dtype));
    round_row_to(dtype, scale.inverse, rows + r * width, width);
    scales[r] = scales[r] < __builtin_inff() ? scale.scale : __builtin_nanf("");
  }
}

// [count][width] to [columns][count]; count and width are multiples of kLanes.
inline void transpose(const float* rows, int64_t count, int64_t width, int64_t columns, float* out) {
  for (int64_t r = 0; r < count; r += kLanes)
    for (int64_t c = 0; c < columns; c += kLanes) {
      Vf x[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) x[i] = load(rows + (r + i) * width + c);
      transpose(x);
      for (int64_t i = 0; i < kLanes; ++i)
        if (c + i < columns) store(out + (c + i) * count + r, x[i]);
    }
}

}  // namespace octet::cpu::OCTET_ISA
