// A mask tensor, as kernels read it: numbers that are added to logits. False hides a key, as -inf does; true adds 0.
#pragma once
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>

#include "core/problem.h"
#include "cuda/ptx/types.h"

namespace octet::cuda {

enum class MaskElement : int { boolean, f32, f16, bf16 };
constexpr int kMaskChunkBytes = 16;  // of a copy of a row

struct MaskTensor {
  const void* data;  // [batch, head, query, key]; null: none
  MaskElement element;
  int64_t stride[4];  // in elements
  int bytes;          // of an element
  bool chunks;        // true: rows are contiguous and start at multiples of 16 bytes

  // Returns the index of the first number of a row.
  __device__ int64_t row(int batch, int head, int query) const {
    return batch * stride[0] + head * stride[1] + query * stride[2];
  }
};
// Returns the mask tensor of a problem; none where the problem has none, or no pair of a query and a key.
MaskTensor mask_tensor(const Problem& p);

template <class T>
struct MaskNumbers;
template <>
struct MaskNumbers<bool> {
  using Word = uint16_t;
  static __device__ float one(const void* mask, int64_t i) {
    return static_cast<const unsigned char*>(mask)[i] ? 0.f : -INFINITY;
  }
  static __device__ float2 two(Word w) { return {w & 0xff ? 0.f : -INFINITY, w >> 8 ? 0.f : -INFINITY}; }
};
template <>
struct MaskNumbers<float> {
  using Word = float2;
  static __device__ float one(const void* mask, int64_t i) { return static_cast<const float*>(mask)[i]; }
  static __device__ float2 two(Word w) { return w; }
};
template <class T>
struct MaskNumbers {
  using Word = uint32_t;
  static __device__ float one(const void* mask, int64_t i) { return float(static_cast<const T*>(mask)[i]); }
  static __device__ float2 two(Word w) { return ptx::unpack<T>(w); }
};

// Calls f with a null pointer to the type of the mask's elements.
template <class F>
__device__ void with_mask_type(MaskElement element, const F& f) {
  switch (element) {
    case MaskElement::boolean:
      return f(static_cast<bool*>(nullptr));
    case MaskElement::f32:
      return f(static_cast<float*>(nullptr));
    case MaskElement::f16:
      return f(static_cast<F16*>(nullptr));
    default:
      return f(static_cast<Bf16*>(nullptr));
  }
}
__device__ inline float mask_number(MaskElement element, const void* mask, int64_t i) {
  float x = 0.f;
  with_mask_type(element, [&](auto* type) { x = MaskNumbers<std::remove_pointer_t<decltype(type)>>::one(mask, i); });
  return x;
}

}  // namespace octet::cuda
