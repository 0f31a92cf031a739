// Small kernels that look at packed sequences on the device, where their lengths are.
#pragma once
#include <cuda_runtime_api.h>

namespace octet::cuda {

// blocks_before[s]: blocks of `rows` queries in the sequences before s; [sequences]: in all.
void count_blocks(const int* cu_seqlens, int sequences, int rows, int* blocks_before, cudaStream_t stream);

}  // namespace octet::cuda
