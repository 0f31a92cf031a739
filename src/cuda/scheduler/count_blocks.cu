#include "cuda/host/status.h"
#include "cuda/scheduler/count_blocks.h"

namespace octet::cuda {
namespace {

// One warp computes a prefix sum over 32 sequences at a time.
__global__ void count_blocks_kernel(const int* cu_seqlens, int sequences, int rows, int* blocks_before) {
  const int lane = threadIdx.x;
  int before = 0;
  for (int first = 0; first < sequences; first += 32) {
    const int s = first + lane;
    const int blocks = s < sequences ? (cu_seqlens[s + 1] - cu_seqlens[s] + rows - 1) / rows : 0;
    int sum = blocks;
    for (int offset = 1; offset < 32; offset *= 2) {
      const int lower = __shfl_up_sync(~0u, sum, offset);
      if (lane >= offset) sum += lower;
    }
    if (s < sequences) blocks_before[s] = before + sum - blocks;
    before += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) blocks_before[sequences] = before;
}

}  // namespace

void count_blocks(const int* cu_seqlens, int sequences, int rows, int* blocks_before, cudaStream_t stream) {
  count_blocks_kernel<<<1, 32, 0, stream>>>(cu_seqlens, sequences, rows, blocks_before);
  check(cudaGetLastError(), "count_blocks");
}

}  // namespace octet::cuda
