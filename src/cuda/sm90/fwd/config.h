// Every tile size, stage count and register count of this generation.
//
// A warpgroup that computes holds 64 rows. Its registers hold s (keys / 2 of them per thread), p (keys / 4) and o
// (dim_v / 2); 232 are left to each of two such warpgroups beside a producer with 40, 160 to each of three.
//
// A thread block cannot take more registers than it was launched with: 504 for three threads, one of each warpgroup,
// and 512 for four. Asking for more waits for ever.
#pragma once
#include <numeric>

#include "cuda/fragment/precision.h"

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
// work on this one. kPingPong: warpgroups take ping_pong at their products.
struct TwoWarpgroups {
  static constexpr int kWarpgroups = 2, kRegisters = 232, kProducerRegisters = 40;
};
struct ThreeWarpgroups {
  static constexpr int kWarpgroups = 3, kRegisters = 160, kProducerRegisters = 32;
};
template <class Precision, class Dims>
struct ForwardTile;
template <class Precision>
struct ForwardTile<Precision, Dims64> : ThreeWarpgroups {
  static constexpr int kKeys = 128, kStages = 2, kQStages = 2;
  static constexpr bool kPingPong = true;
};
template <class Precision>
struct ForwardTile<Precision, Dims128> : TwoWarpgroups {
  static constexpr int kKeys = 128, kStages = 2, kQStages = 2;
  static constexpr bool kPingPong = true;
};
template <class Precision>
struct ForwardTile<Precision, Dims192x128> : TwoWarpgroups {
  static constexpr int kKeys = 128, kStages = 2, kQStages = 1;
  static constexpr bool kPingPong = true;
};
template <class Precision>
struct ForwardTile<Precision, Dims256> : TwoWarpgroups {
  static constexpr int kKeys = 80, kStages = 2, kQStages = 1;
  static constexpr bool kPingPong = true;
};

// Logits of quantized values: half the bytes of q and k, more instructions for each logit.
template <>
struct ForwardTile<PrecisionInt8F16, Dims64> : ThreeWarpgroups {
  static constexpr int kKeys = 112, kStages = 2, kQStages = 2;
  static constexpr bool kPingPong = false;
};
template <>
struct ForwardTile<PrecisionInt8F16, Dims128> : ThreeWarpgroups {
  static constexpr int kKeys = 80, kStages = 4, kQStages = 2;
  static constexpr bool kPingPong = false;
};
template <>
struct ForwardTile<PrecisionInt8F16, Dims192x128> : TwoWarpgroups {
  static constexpr int kKeys = 128, kStages = 2, kQStages = 1;
  static constexpr bool kPingPong = false;
};
template <>
struct ForwardTile<PrecisionInt8F16, Dims256> : TwoWarpgroups {
  static constexpr int kKeys = 96, kStages = 2, kQStages = 1;
  static constexpr bool kPingPong = false;
};

// 8-bit forward. The registers of a group hold s (keys / 2), p (keys / 8), o and the sum of rounded P (dim_v / 2
// + 4); where quantized values of P change their scale, a product r as large as o and no such sum. Scales of keys take
// registers too, in the groups and in the producer.
//   kPingPong         groups take ping_pong at their exponentials
//   kSkips         a group passes over tiles of which its queries see nothing
constexpr int k8BitStages = 3;  // of k and v
template <class Precision, class Dims>
struct Forward8BitTile;
template <class Precision>
struct Forward8BitTile<Precision, Dims64> {
  static constexpr bool kChanges = Precision::kScaled;
  static constexpr int kWarpgroups = 3, kKeys = kChanges ? 96 : 128, kQStages = kChanges ? 1 : 2;
  static constexpr int kRegisters = 160, kProducerRegisters = 32;
  static constexpr bool kPingPong = false, kSkips = !kChanges;
};
template <class Precision>
struct Forward8BitTile<Precision, Dims128> {
  static constexpr bool kChanges = Precision::kScaled;
  static constexpr int kWarpgroups = kChanges ? 2 : 3, kKeys = kChanges ? 128 : 96, kQStages = 1;
  static constexpr int kRegisters = kChanges ? 232 : 160, kProducerRegisters = kChanges ? 40 : 32;
  static constexpr bool kPingPong = kChanges, kSkips = !kChanges;
};

// The keys of a sequence lie in whole multiples of this many: tiles, and blocks of tokens whose groups have scales.
template <class Precision, class Dims>
constexpr int kLaidOutKeys = std::lcm(Forward8BitTile<Precision, Dims>::kKeys,
                                      Precision::kKeyScales == KeyScales::groups ? kGroupBlock : 1);

}  // namespace octet::cuda::sm90
