// Every tile size and stage count of the backward pass.
#pragma once
#include "cuda/backward/tile_sizes.h"

namespace octet::cuda::sm80 {

// A thread block computes dk and dv of `kKeys` keys, in iterations of `kQueries` queries, with `kStages` stages of q
// and `kDoStages` of do; `kBlocks` thread blocks share a multiprocessor that has shared memory for them. The warps
// divide a product into rows and columns: `kWarpRows` parts of the rows of s and dp, of dk and dv, and of dq.
template <int Dim, bool General>
struct BackwardConfig;
template <>
struct BackwardConfig<64, false> {
  static constexpr int kWarps = 4, kQueries = 64, kKeys = 64, kStages = 2, kDoStages = 2, kBlocks = 3;
  static constexpr int kSWarpRows = 2, kKeyWarpRows = 2, kDqWarpRows = 2;
};
template <>
struct BackwardConfig<128, false> {
  static constexpr int kWarps = 4, kQueries = 64, kKeys = 64, kStages = 2, kDoStages = 1, kBlocks = 2;
  static constexpr int kSWarpRows = 2, kKeyWarpRows = 2, kDqWarpRows = 2;
};
template <>
struct BackwardConfig<256, false> {
  static constexpr int kWarps = 4, kQueries = 32, kKeys = 32, kStages = 2, kDoStages = 1, kBlocks = 2;
  static constexpr int kSWarpRows = 2, kKeyWarpRows = 1, kDqWarpRows = 1;
};
// With terms of logits (sm80/logits.h), which need registers.
template <>
struct BackwardConfig<64, true> {
  static constexpr int kWarps = 4, kQueries = 64, kKeys = 64, kStages = 2, kDoStages = 2, kBlocks = 2;
  static constexpr int kSWarpRows = 2, kKeyWarpRows = 2, kDqWarpRows = 2;
};
template <>
struct BackwardConfig<128, true> {
  static constexpr int kWarps = 4, kQueries = 32, kKeys = 64, kStages = 2, kDoStages = 1, kBlocks = 2;
  static constexpr int kSWarpRows = 2, kKeyWarpRows = 2, kDqWarpRows = 2;
};
template <>
struct BackwardConfig<256, true> : BackwardConfig<256, false> {};

// The part of a product of `Rows` x `Columns` numbers that one warp computes.
template <int Rows, int Columns, int Warps, int WarpRows>
struct WarpPart {
  static constexpr int kBlocks = Rows / WarpRows / 16;  // of 16 rows
  static constexpr int kColumns = Columns * WarpRows / Warps;
  static_assert(Rows % (16 * WarpRows) == 0 && Warps % WarpRows == 0 && kColumns % 16 == 0);
  static __device__ int row_block(int warp) { return warp % WarpRows * kBlocks; }
  static __device__ int column_block(int warp) { return warp / WarpRows * (kColumns / 16); }
};

}  // namespace octet::cuda::sm80
