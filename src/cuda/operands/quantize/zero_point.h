// Zero points of int8 and uint8 codes, which are taken as signed bytes.
#pragma once
#include <cuda_runtime_api.h>

namespace octet::cuda {

// A zero point z and a sum of codes of its token in one word, as kernels read them. For queries the sum lacks z for
// each channel: sum (a - z)(b - y) = sum a b - z sum b - y sum (a - z), in integers.
struct ZeroPoint {
  int word;
  __device__ static ZeroPoint of(int zero, int sum) { return {sum * 256 + (zero & 255)}; }
  __device__ int zero() const { return static_cast<signed char>(word); }
  __device__ int sum() const { return word >> 8; }
};

}  // namespace octet::cuda
