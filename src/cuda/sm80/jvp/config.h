// The tiles of the jvp pass.
//
// A warp computes 16 queries: a thread holds s and its tangent (keys / 2 registers each) and o and its tangent (columns
// of v / 2 each). Where the columns of v are more than a thread block has, several thread blocks share them.
#pragma once

namespace octet::cuda::sm80 {

//   kDimV    columns of v of a thread block
//   kKeys    keys of a tile
//   kBlocks  thread blocks that a multiprocessor's registers must have room for
template <int Dim>
struct JvpTile;
template <>
struct JvpTile<64> {
  static constexpr int kDimV = 64, kKeys = 64, kBlocks = 2;
};
template <>
struct JvpTile<128> {
  static constexpr int kDimV = 128, kKeys = 48, kBlocks = 2;
};
template <>
struct JvpTile<256> {
  static constexpr int kDimV = 128, kKeys = 16, kBlocks = 2;
};
constexpr int kJvpWarps = 4, kJvpThreads = 32 * kJvpWarps, kJvpRows = 16 * kJvpWarps;

}  // namespace octet::cuda::sm80
