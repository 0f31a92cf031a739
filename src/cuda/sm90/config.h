// Every tile size, stage count and register count of this generation.
//
// A warpgroup that computes holds 64 rows. Its registers hold s (keys / 2 of them per thread), p (keys / 4) and o
// (dim_v / 2); 232 are left to each of two such warpgroups beside a loader with 40, 160 to each of three.
//
// A thread block cannot take more registers than it was launched with: 504 for three threads, one of each warpgroup,
// and 512 for four. Asking for more waits for ever.
#pragma once
#include <numeric>

#include "cuda/attn/precision.h"

namespace octet::cuda::sm90 {

// Head dims that kernels are built for; smaller ones are filled with zeros.
template <int Dim_, int DimV_>
struct HeadDims {
  static constexpr int kDim = Dim_, kDimV = DimV_;
};
using Dims64 = HeadDims<64, 64>;
using Dims128 = HeadDims<128, 128>;
using Dims192x128 = HeadDims<192, 128>;
using Dims256 = HeadDims<256, 256>;

// kStages: of k, and of v. kQStages: where there is room, the queries of the next block arrive while warpgroups still
// work on this one. kTurns: warpgroups take turns at their products.
struct TwoWarpgroups {
  static constexpr int kWarpgroups = 2, kRegisters = 232, kLoaderRegisters = 40;
};
struct ThreeWarpgroups {
  static constexpr int kWarpgroups = 3, kRegisters = 160, kLoaderRegisters = 32;
};
template <class Precision, class Dims>
struct ForwardTile;
template <class Precision>
struct ForwardTile<Precision, Dims64> : ThreeWarpgroups {
  static constexpr int kKeys = 128, kStages = 2, kQStages = 2;
  static constexpr bool kTurns = true;
};
template <class Precision>
struct ForwardTile<Precision, Dims128> : TwoWarpgroups {
  static constexpr int kKeys = 128, kStages = 2, kQStages = 2;
  static constexpr bool kTurns = true;
};
template <class Precision>
struct ForwardTile<Precision, Dims192x128> : TwoWarpgroups {
  static constexpr int kKeys = 128, kStages = 2, kQStages = 1;
  static constexpr bool kTurns = true;
};
template <class Precision>
struct ForwardTile<Precision, Dims256> : TwoWarpgroups {
  static constexpr int kKeys = 80, kStages = 2, kQStages = 1;
  static constexpr bool kTurns = true;
};

// Logits of codes: half the bytes of q and k, more instructions for each logit.
template <>
struct ForwardTile<PrecisionInt8F16, Dims64> : ThreeWarpgroups {
  static constexpr int kKeys = 112, kStages = 2, kQStages = 2;
  static constexpr bool kTurns = false;
};
template <>
struct ForwardTile<PrecisionInt8F16, Dims128> : ThreeWarpgroups {
  static constexpr int kKeys = 80, kStages = 4, kQStages = 2;
  static constexpr bool kTurns = false;
};
template <>
struct ForwardTile<PrecisionInt8F16, Dims192x128> : TwoWarpgroups {
  static constexpr int kKeys = 128, kStages = 2, kQStages = 1;
  static constexpr bool kTurns = false;
};
template <>
struct ForwardTile<PrecisionInt8F16, Dims256> : TwoWarpgroups {
  static constexpr int kKeys = 96, kStages = 2, kQStages = 1;
  static constexpr bool kTurns = false;
};

// 8-bit forward. The registers of a group hold s (keys / 2), p (keys / 8), o and the sum of rounded weights (dim_v / 2
// + 4); where codes of p change their step, a product r as large as o and no such sum. Steps of keys take registers
// too, in the groups and in the loader.
//   kTurns         groups take turns at their exponentials
//   kSkips         a group passes over tiles of which its queries see nothing
constexpr int kByteStages = 3;  // of k and v
template <class Precision, class Dims>
struct ByteForwardTile;
template <class Precision>
struct ByteForwardTile<Precision, Dims64> {
  static constexpr bool kChanges = Precision::kScaled;
  static constexpr int kWarpgroups = 3, kKeys = kChanges ? 96 : 128, kQStages = kChanges ? 1 : 2;
  static constexpr int kRegisters = 160, kLoaderRegisters = 32;
  static constexpr bool kTurns = false, kSkips = !kChanges;
};
template <class Precision>
struct ByteForwardTile<Precision, Dims128> {
  static constexpr bool kChanges = Precision::kScaled;
  static constexpr int kWarpgroups = kChanges ? 2 : 3, kKeys = kChanges ? 128 : 96, kQStages = 1;
  static constexpr int kRegisters = kChanges ? 232 : 160, kLoaderRegisters = kChanges ? 40 : 32;
  static constexpr bool kTurns = kChanges, kSkips = !kChanges;
};

// The keys of a sequence lie in whole multiples of this many: tiles, and blocks of tokens whose groups have steps.
template <class Precision, class Dims>
constexpr int kLaidOutKeys = std::lcm(ByteForwardTile<Precision, Dims>::kKeys,
                                      Precision::kKeySteps == KeySteps::groups ? kGroupBlock : 1);

// Backward: `kQueries` per step, `kKeys` per thread block, `kStages` stages of q, `kDoStages` of do. Two
// warpgroups share the work: each has 64 keys and holds s, dp (queries / 2 registers each), dk, dv (dim / 2 each) and
// half of dq. At d = 256 a pair of thread blocks has the keys: one warpgroup of each holds s and dp of 64 keys, two dk
// and dv of 64 keys and a quarter of dq, for half of the channels.
constexpr int kBackwardWarps = 8;  // that compute
constexpr int kBackwardRegisters = 232, kBackwardLoaderRegisters = 40;
// How partial sums of dq are added: floats as they come, or integers, whose sum is the same in any order.
enum class Sums { floats, integers };
// How many numbers a thread adds to the sums of dq at a time.
template <int Dim, Sums sums>
constexpr int kSumsAtOnce = sums == Sums::integers ? 1
                            : Dim == 64            ? 4
                            : Dim == 128           ? 2
                                                   : 1;
template <int Dim>
struct BackwardTile;
template <>
struct BackwardTile<64> {
  static constexpr int kQueries = 128, kKeys = 128, kStages = 3, kDoStages = 2;
};
template <>
struct BackwardTile<128> {
  static constexpr int kQueries = 64, kKeys = 128, kStages = 2, kDoStages = 2;
};
template <>
struct BackwardTile<256> {
  static constexpr int kQueries = 64, kKeys = 128, kStages = 2;
};
constexpr int kPairLoaderRegisters = 32, kPairWeightsRegisters = 96, kPairSumsRegisters = 192;

}  // namespace octet::cuda::sm90
