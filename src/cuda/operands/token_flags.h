// Flags of tokens, which tell those that are seen.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace octet::cuda {

// Flags of the tokens of each (batch, head), or of those that the mask tells apart: 1 for a token that is seen.
struct TokenFlags {
  unsigned char* data;
  int batches, heads;  // 1 where the mask is the same for all
  int64_t stride;      // from head to head

  __device__ unsigned char* of(int batch, int head) const {
    return data + (int64_t{batch % batches} * heads + head % heads) * stride;
  }
};

}  // namespace octet::cuda
