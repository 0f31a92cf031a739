// A block table finds the keys of a KV cache: it names the page in which each token lies.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace octet::cuda {

struct PageTable {
  const int* table;  // null: page n is that of sequence n
  int64_t stride;    // from a sequence to the next
  int shift;         // pages have 2^shift tokens; 31: a sequence has one page, of any number of tokens
  // The keys of each batch element, of which those beyond `most` do not count. Null: sequences are packed.
  const int* lengths;
  int most;

  __device__ int64_t page(int sequence, int token) const {
    return table ? table[sequence * stride + (token >> shift)] : sequence;
  }
  __device__ int length(int sequence) const {
    const int length = lengths[sequence];
    return length < 0 ? 0 : length < most ? length : most;
  }
  __device__ int token_in_page(int token) const { return token & static_cast<int>((1u << shift) - 1); }
};

}  // namespace octet::cuda
