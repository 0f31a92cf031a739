// Shared by the parts of the quantization kernel: its scratch memory, its parameters and its number of threads.
#pragma once
#include "cuda/operands/quantize/key_tiles.h"
#include "cuda/operands/quantize/quantize.h"
#include "cuda/ptx/flags.h"

namespace octet::cuda {

constexpr int kQuantizeThreads = 128, kQuantizeWarps = kQuantizeThreads / 32;

// The statistics of the first pass: means of k and of v, or the largest magnitudes of v.
enum class StatsOf : int { k, v, count };

struct Scratch {
  // All are 0 when the kernel starts: the number of items that have been taken; for each kind of statistics [stats,
  // sequence, head] the number of thread blocks that have added to it, and a flag that its result is ready; a flag that
  // some v is infinite.
  unsigned *next_item, *arrived, *ready, *infinite;
  std::size_t zeros;  // bytes
  // For the channels of each chunk, [batch, head, chunk, dim]: sums of k and of v, and largest magnitudes of v.
  double* sum[static_cast<int>(StatsOf::count)];
  float* most;
  float* limit[static_cast<int>(StatsOf::count)];  // [sequence, head] of k and of v: see mean_limit.h
};

struct QuantizeKernelParams {
  QuantizeParams args;
  Scratch scratch;
  KeyTiles chunks;     // the chunks of k and v in statistics
  int sequence_heads;  // sequences times heads
  // The size of an item: tiles of k and of v, rows of q.
  int key_tiles, value_tiles, queries;
  bool stats_of_k, stats_of_v;

  // The index of a sequence and head, as in Channels.
  __device__ int sequence_head(int batch_head, int sequence) const {
    return args.cu_seqlens_q || args.keys.cu_seqlens ? sequence * args.kv_heads + batch_head % args.kv_heads
                                                     : batch_head;
  }
  __device__ void wait(StatsOf stats, int sequence_head) const {
    ptx::wait_until_set(scratch.ready[static_cast<int>(stats) * sequence_heads + sequence_head]);
  }
  // Waits with all threads of a block, of which one polls.
  __device__ void wait_together(StatsOf stats, int sequence_head) const {
    if (threadIdx.x == 0) wait(stats, sequence_head);
    __syncthreads();
  }
};

// Clears the counters, and finds the limits of the means that are wanted. The kernel that follows may be launched with
// launch_general_pdl (host/launch.h).
void find_limits(const QuantizeKernelParams& p, void* scratch, cudaStream_t stream);
// Computes the block means, once the limits are known.
void find_block_means(const QuantizeKernelParams& p, cudaStream_t stream);

// Loads channels that another thread block of this kernel has written.
__device__ inline float4 fetch_channels(const float* x) { return __ldcg(reinterpret_cast<const float4*>(x)); }

}  // namespace octet::cuda
