// A small kernel that reads the lengths of packed sequences on the device.
#pragma once
#include <cuda_runtime_api.h>

namespace octet::cuda {

// Sets blocks_before[s] to the number of blocks of `rows` queries in the sequences before s, and
// blocks_before[sequences] to the total.
void count_blocks(const int* cu_seqlens, int sequences, int rows, int* blocks_before, cudaStream_t stream);

}  // namespace octet::cuda
