// Parts of tiles, values of columns, and copies and arrivals that the backward mainloops and producers share.
#pragma once
#include "cuda/ptx/mbarrier.h"
#include "cuda/sm90/mma.h"

namespace octet::cuda::sm90 {

// One number for each column of a fragment that this thread holds.
template <int Columns>
struct ColumnValues {
  float2 x[Columns / 8];
  __device__ explicit ColumnValues(const float* from) { read(from); }
  __device__ void read(const float* from) {
#pragma unroll
    for (int i = 0; i < Columns / 8; ++i) x[i] = *reinterpret_cast<const float2*>(from + 8 * i + fragment_column());
  }
  __device__ float of(int element) const { return element % 2 ? x[element / 4].y : x[element / 4].x; }
};

// Starts the copy of a preprocessed tile, or of a part of it, to shared memory; `full` counts its bytes.
__device__ inline void fetch(void* to, const void* from, uint32_t bytes, Barrier& full) {
  namespace ptx = ::cuda::ptx;
  ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, to, from, bytes, &full.word);
}

// Arrives once for all lanes of a warp.
__device__ inline void arrive_as_warp(Barrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier.arrive();
}

// Returns columns [channel, channel + Columns) of a tile; both are multiples of 64.
template <int Columns, class TileX>
__device__ SharedTile<typename TileX::Element, TileX::kRows, Columns, TileX::kInCluster> columns_of(const TileX& x,
                                                                                                    int channel) {
  return {x.data + channel / kPanelColumns * TileX::kPanelBytes};
}

}  // namespace octet::cuda::sm90
