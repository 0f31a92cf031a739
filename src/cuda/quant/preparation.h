// What the parts of `prepare` share: its scratch, the units of work that thread blocks draw, and the layout of threads.
#pragma once
#include "cuda/ptx/flags.h"
#include "cuda/quant/codes.h"
#include "cuda/quant/key_tiles.h"

namespace octet::cuda {

constexpr int kPrepareThreads = 128, kPrepareWarps = kPrepareThreads / 32;

// The first look: means of k and of v, or the largest numbers of v.
enum class Survey : int { k, v, count };

struct Scratch {
  // Zero when the kernel starts: how many units have been drawn, and of each survey [survey, sequence, head] how many
  // thread blocks have added to it, and whether its result is there; whether any v is infinite.
  unsigned *drawn, *arrived, *ready, *infinite;
  std::size_t zeros;  // bytes
  // Sums of k and of v, largest numbers of v: of the channels of each chunk, [batch, head, chunk, dim].
  double* sum[static_cast<int>(Survey::count)];
  float* most;
  float* limit[static_cast<int>(Survey::count)];  // [sequence, head] of k and of v: see limits.h
};

struct Preparation {
  CodesArguments codes;
  Scratch scratch;
  KeyTiles chunks;     // of a survey
  int sequence_sides;  // sequences times heads
  // Of a unit of codes: tiles of k and of v, rows of q.
  int key_tiles, value_tiles, queries;
  bool surveys_k, surveys_v;

  // A sequence and head, as in Channels.
  __device__ int sequence_side(int side, int sequence) const {
    return codes.cu_seqlens_q || codes.keys.cu_seqlens ? sequence * codes.kv_heads + side % codes.kv_heads : side;
  }
  __device__ void wait(Survey survey, int sequence_side) const {
    ptx::wait_until_set(scratch.ready[static_cast<int>(survey) * sequence_sides + sequence_side]);
  }
  // The same for all threads of a block: one looks.
  __device__ void wait_together(Survey survey, int sequence_side) const {
    if (threadIdx.x == 0) wait(survey, sequence_side);
    __syncthreads();
  }
};

// Clears the counters, and finds the limits of the means that are wanted; the kernel after it may be one that waits
// (ptx/grid.h).
void find_limits(const Preparation& p, void* scratch, cudaStream_t stream);

// A number of channels that another thread block of this kernel has written.
__device__ inline float4 fetch_channels(const float* x) { return __ldcg(reinterpret_cast<const float4*>(x)); }

}  // namespace octet::cuda
