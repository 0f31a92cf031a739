// What the parts of `preprocess` share: its scratch, the items of work that thread blocks draw, and the layout of
// threads.
#pragma once
#include "cuda/preprocess/key_tiles.h"
#include "cuda/preprocess/quantize.h"
#include "cuda/ptx/flags.h"

namespace octet::cuda {

constexpr int kQuantizeThreads = 128, kQuantizeWarps = kQuantizeThreads / 32;

// The first look: means of k and of v, or the largest numbers of v.
enum class StatsOf : int { k, v, count };

struct Scratch {
  // Zero when the kernel starts: how many items have been drawn, and of each stats [stats, sequence, head] how many
  // thread blocks have added to it, and whether its result is there; whether any v is infinite.
  unsigned *drawn, *arrived, *ready, *infinite;
  std::size_t zeros;  // bytes
  // Sums of k and of v, largest numbers of v: of the channels of each chunk, [batch, head, chunk, dim].
  double* sum[static_cast<int>(StatsOf::count)];
  float* most;
  float* limit[static_cast<int>(StatsOf::count)];  // [sequence, head] of k and of v: see mean_limit.h
};

struct QuantizeKernelParams {
  QuantizeParams args;
  Scratch scratch;
  KeyTiles chunks;     // of statistics
  int sequence_heads;  // sequences times heads
  // Of an item of quantized values: tiles of k and of v, rows of q.
  int key_tiles, value_tiles, queries;
  bool stats_of_k, stats_of_v;

  // A sequence and head, as in Channels.
  __device__ int sequence_head(int batch_head, int sequence) const {
    return args.cu_seqlens_q || args.keys.cu_seqlens ? sequence * args.kv_heads + batch_head % args.kv_heads
                                                     : batch_head;
  }
  __device__ void wait(StatsOf stats, int sequence_head) const {
    ptx::wait_until_set(scratch.ready[static_cast<int>(stats) * sequence_heads + sequence_head]);
  }
  // The same for all threads of a block: one looks.
  __device__ void wait_together(StatsOf stats, int sequence_head) const {
    if (threadIdx.x == 0) wait(stats, sequence_head);
    __syncthreads();
  }
};

// Clears the counters, and finds the limits of the means that are wanted; the kernel after it may be one that waits
// (ptx/grid.h).
void find_limits(const QuantizeKernelParams& p, void* scratch, cudaStream_t stream);

// A number of channels that another thread block of this kernel has written.
__device__ inline float4 fetch_channels(const float* x) { return __ldcg(reinterpret_cast<const float4*>(x)); }

}  // namespace octet::cuda
