// Every stage count and register count of the backward pass. bwd/tile_sizes.h has the tile sizes.
#pragma once
#include <type_traits>

#include "cuda/bwd/tile_sizes.h"
#include "cuda/sm90/head_dims.h"

namespace octet::cuda::sm90 {

// The head dims that there are kernels for. Those between 64, 128 and 256 read and write the same tiles in memory as
// the next of these, tile_dim() columns wide, but do not multiply the padding. Where the columns lie as at 128, its
// kernel computes the further bins of a head, which are rare.
template <Sums sums, Bins bins>
using BackwardDims = std::conditional_t<
    bins == Bins::further,
    std::conditional_t<sums == Sums::floats, DimsList<Dims64, Dims128, Dims160, Dims192x128, Dims192, Dims256>,
                       DimsList<Dims64, Dims128, Dims256>>,
    std::conditional_t<sums == Sums::floats,
                       DimsList<Dims64, Dims80, Dims96, Dims128, Dims160, Dims192x128, Dims192, Dims256>,
                       DimsList<Dims64, Dims80, Dims96, Dims128, Dims256>>>;
constexpr int tile_dim(int dim) { return dim <= 64 ? 64 : dim <= 128 ? 128 : 256; }

// A thread block computes dk and dv of `kKeys` keys, in iterations of `kQueries` queries, with `kStages` stages of q
// and `kDoStages` stages of do. Up to d = 128, each of two consumer warpgroups has 64 keys and holds s and dp (queries
// / 2 registers each), dk and dv (dim / 2 each) and half of dq. At d = 256, a 2-CTA cluster has the keys: in each
// thread block, one warpgroup holds s and dp of 64 keys; each of two others holds, for half of the channels, dk and dv
// of 64 keys and a quarter of dq.
constexpr int kBackwardWarps = 8;                                         // consumer warps
constexpr int kBackwardRegisters = 232, kBackwardProducerRegisters = 40;  // per thread
// A mask tensor takes the place of the third stage of q. It comes in units of kMaskQueries queries and 64 keys, in a
// ring of kMaskStages for each warpgroup.
template <int Dim, bool Masked = false>
struct BackwardStages {
  static constexpr int kStages = Dim == 64 && !Masked ? 3 : 2, kDoStages = 2;
};
constexpr int kMaskQueries = 16, kMaskStages = 7;
// The stages of the 2-CTA kernel: of the local columns of q and of do, of the remote ones of both, and of p.
template <class Dims>
struct Stages2Cta {
  static constexpr int kQ = Dims::kDim > 192 ? 2 : 3, kDo = Dims::kDimV > 128 ? 2 : 3,
                       kRemote = Dims::kDim > 192 ? 1 : 2, kP = Dims::kDimV > 128 ? 1 : 2;
};
// Registers per thread of the 2-CTA kernel's warpgroups: the producer, the one for p and ds, the two for gradients.
template <int Dim>
struct Registers2Cta {
  static constexpr int kProducer = 32, kP = Dim > 192 ? 96 : 160, kGradients = Dim > 192 ? 192 : 160;
};

}  // namespace octet::cuda::sm90
