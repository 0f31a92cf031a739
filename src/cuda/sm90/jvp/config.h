// Every tile size, stage count and register count of the jvp pass.
//
// A consumer warpgroup computes 64 rows. Each of its threads holds s and its tangent (keys / 2 registers each), and o
// and its tangent (dim_v / 2 each).
#pragma once
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

using JvpDims = DimsList<Dims64, Dims128>;

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

}  // namespace octet::cuda::sm90
