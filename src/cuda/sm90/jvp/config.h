// Every tile size, stage count and register count of the jvp pass.
//
// A consumer warpgroup computes 64 rows. Each of its threads holds s and its tangent (keys / 2 registers each), and o
// and its tangent (dim_v / 2 each).
#pragma once
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

using JvpDims = DimsList<Dims64, Dims80, Dims96, Dims128>;

//   kKeys      keys of a tile
//   kStages    stages of the pipeline of k and tk, and of that of v and tv
template <class Dims>
struct JvpTile;
template <>
struct JvpTile<Dims64> : TwoWarpgroups {
  static constexpr int kKeys = 128, kStages = 2;
};
template <>
struct JvpTile<Dims128> : TwoWarpgroups {
  static constexpr int kKeys = 64, kStages = 2;
};
// Tiles of 80 and 96 channels take as much shared memory as those of 128.
template <>
struct JvpTile<Dims80> : JvpTile<Dims128> {};
template <>
struct JvpTile<Dims96> : JvpTile<Dims128> {};

}  // namespace octet::cuda::sm90
