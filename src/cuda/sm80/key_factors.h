// The scales of int8 keys, in the form in which integer sums become logits.
//
// An integer sum begins at the bits of 1.5 2^10 and is read as a float: 1.5 2^10 + sum 2^-13, as |sum| < 2^22. With a
// scale c of 22 bits the product 1.5 2^10 c is exact, so that one fused product gives sum c 2^-13, rounded once:
//   (1.5 2^10 + sum 2^-13) c - 1.5 2^10 c
// which takes the place of a conversion and a product. What the scale loses is less than 2^-21 of it. Keys and queries
// may be as large as 2^122.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace octet::cuda::sm80 {

constexpr float kSumsBegin = 0x1.8p10f, kUnitsOfSum = 0x1p13f;

// The factors of two keys, side by side as a thread has them: the scale, and -kSumsBegin times the scale.
struct alignas(16) KeyPairFactors {
  float scale[2], begin[2];
};

struct KeyPairFactorsView {
  const KeyPairFactors* data;  // [batch, kv_head, key / 2]
  int heads, keys;
  __device__ const KeyPairFactors* at(int batch, int head, int key) const {
    return data + ((int64_t{batch} * heads + head) * keys + key) / 2;
  }
};

// Whether keys that are not finite, whose scale is NaN, keep it, or have factors of 0.
enum class NonFiniteKeys { kept, zero };

// The scales of keys: of each key, or of each thread group of 64 keys (QuantizeParams::k_scale); and what sums of
// products begin at.
struct ScalesOfKeys {
  const float* data;
  NonFiniteKeys nonfinite = NonFiniteKeys::kept;
  bool groups = false;
  float sums_begin = kSumsBegin;
};

// Computes the factors of `count` keys, an even number, from their scales.
void compute_key_factors(const ScalesOfKeys& scales, int64_t count, KeyPairFactors* factors, cudaStream_t stream);

}  // namespace octet::cuda::sm80
