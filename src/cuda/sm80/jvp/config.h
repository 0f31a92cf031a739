// The tiles of the jvp pass.
//
// A warp computes 16 queries: a thread holds s and its tangent (keys / 2 registers each) and o and its tangent (columns
// of v / 2 each). Where the columns of v are more than a thread block has, several thread blocks share them.
#pragma once

namespace octet::cuda::sm80 {

// The tangents that a kernel is given. One for `some` looks which of them there are.
enum class Tangents : int { all, some };

//   kWarps   warps of a thread block
//   kDimV    columns of v of a thread block
//   kKeys    keys of a tile
//   kLateV   true: v and tv take the place of k and tk, once these have been read
//   kBlocks  thread blocks that a multiprocessor's registers must have room for
template <int Dim, Tangents tangents>
struct JvpTile;  // of 16 bits
template <Tangents tangents>
struct JvpTile<64, tangents> {
  static constexpr int kWarps = 4, kDimV = 64, kKeys = 64, kBlocks = 2;
  static constexpr bool kLateV = false;
};
template <Tangents tangents>
struct JvpTile<128, tangents> {
  static constexpr int kWarps = 4, kDimV = 128, kKeys = tangents == Tangents::all ? 48 : 32, kBlocks = 2;
  static constexpr bool kLateV = false;
};
template <Tangents tangents>
struct JvpTile<256, tangents> {
  static constexpr int kWarps = 4, kDimV = 128, kKeys = 16, kBlocks = 2;
  static constexpr bool kLateV = false;
};

// f32, in two f16 halves.
template <int Dim>
struct F16HalvesJvpTile;
template <>
struct F16HalvesJvpTile<64> {
  static constexpr int kWarps = 4, kDimV = 64, kKeys = 32, kBlocks = 2;
  static constexpr bool kLateV = true;
};
template <>
struct F16HalvesJvpTile<128> {
  static constexpr int kWarps = 4, kDimV = 128, kKeys = 16, kBlocks = 2;
  static constexpr bool kLateV = true;
};
template <>
struct F16HalvesJvpTile<256> {
  static constexpr int kWarps = 2, kDimV = 128, kKeys = 16, kBlocks = 2;
  static constexpr bool kLateV = true;
};

}  // namespace octet::cuda::sm80
