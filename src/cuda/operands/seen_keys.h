// The keys that a mask tensor leaves to some query, found by a thread block of any kernel.
#pragma once
#include "cuda/fragment/positional_mask.h"
#include "cuda/operands/mask_tensor.h"
#include "cuda/operands/token_flags.h"
#include "cuda/ptx/max.h"

namespace octet::cuda {

constexpr int kListThreads = 256, kListWarps = kListThreads / 32;
constexpr int kListedKeys = 32;  // of a thread block

// The rows of a mask that may see a key: the queries that differ, and the heads that share a head of k and v.
struct SeeingRows {
  int queries, heads;
};

inline unsigned key_list_blocks(const TokenFlags& seen, int64_t keys) {
  return static_cast<unsigned>((keys + kListedKeys - 1) / kListedKeys * seen.batches * seen.heads);
}

// Lists which of 32 keys of one (batch, head) some query sees: a lane has a key, a warp every kListWarps-th query.
// Queries come from the last on, which under causal masks sees most; the thread block ends as soon as all of its keys
// are seen. Where `counts` is not null, it is added to counts[batch, head] how many are. `block`: of key_list_blocks.
template <class T>
__device__ void list_keys_of_block(unsigned block, const MaskTensor& t, const Mask& mask, int n, int m,
                                   const SeeingRows& rows, const TokenFlags& seen, int* counts) {
  constexpr int kAtOnce = 8;  // queries of a warp
  __shared__ unsigned found;  // a bit for each key
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  const unsigned blocks = (m + kListedKeys - 1) / kListedKeys, of = block / blocks;
  const int key = static_cast<int>(block % blocks * kListedKeys + threadIdx.x % 32);
  const int batch = static_cast<int>(of) / seen.heads, head = static_cast<int>(of) % seen.heads;
  for (int last = rows.queries - 1; last >= 0; last -= kAtOnce * kListWarps) {
    float most = key >= m ? 0.f : -INFINITY;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = max(last - i * kListWarps - static_cast<int>(threadIdx.x) / 32, 0);
      const Interval range = mask.keys_of(row, n, m);
      for (int h = 0; h < rows.heads; ++h) {
        const int64_t at = t.row(batch, head * rows.heads + h, row) + min(key, m - 1) * t.stride[3];
        const float number = MaskNumbers<T>::one(t.data, at);
        most = ptx::max_or_nan(most, key >= range.first && key < range.last ? number : -INFINITY);
      }
    }
    const unsigned seen_by_warp = __ballot_sync(~0u, most != -INFINITY);
    if (threadIdx.x % 32 == 0) atomicOr(&found, seen_by_warp);
    if (__syncthreads_or(found != ~0u) == 0) break;
  }
  if (threadIdx.x < kListedKeys && key < m) seen.of(batch, head)[key] = found >> threadIdx.x & 1;
  if (counts && threadIdx.x == 0) atomicAdd(&counts[of], __popc(found & ~0u >> max(key + kListedKeys - m, 0)));
}

}  // namespace octet::cuda
