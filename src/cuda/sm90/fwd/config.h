// Every tile size, stage count and register count of the forward pass.
//
// A consumer warpgroup computes 64 rows. Each of its threads holds s (keys / 2 registers), p (keys / 4) and o
// (dim_v / 2). Each of two consumer warpgroups can have 232 registers per thread beside a producer with 40; each of
// three can have 160 beside a producer with 32.
//
// A thread block cannot allocate more registers than it was launched with. One thread of each warpgroup may have, in
// sum, 504 registers with three warpgroups and 512 with four; reg_alloc of more than that never returns.
#pragma once
#include <numeric>
#include <type_traits>

#include "cuda/fragment/alibi.h"
#include "cuda/fragment/masked.h"
#include "cuda/fragment/precision.h"
#include "cuda/sm90/head_dims.h"

namespace octet::cuda::sm90 {

// A precision whose kernels have one tile of keys, as large as the 77 tokens of a text that images attend to.
template <class Precision>
struct WithFewKeys : Precision {};
template <class Precision>
constexpr bool kHasFewKeys = false;
template <class Precision>
constexpr bool kHasFewKeys<WithFewKeys<Precision>> = true;
constexpr int kFewKeys = 80;

// The head dims that the kernels of a precision are built for.
template <class Precision>
using ForwardDims = std::conditional_t<
    kHasAlibi<Precision> || kHasDropout<Precision> || kHasMask<Precision>, ExtraDims,
    std::conditional_t<
        kHasFewKeys<Precision>, DimsList<Dims64, Dims80, Dims128>,
        std::conditional_t<kIntegerLogits<Precision> || kHasBeta<Precision>,
                           DimsList<Dims64, Dims128, Dims192x128, Dims256>,
                           DimsList<Dims64, Dims80, Dims96, Dims128, Dims160, Dims192x128, Dims192, Dims256>>>>;
using Forward8BitDims = DimsList<Dims64, Dims128>;

// Registers are per thread.
struct TwoWarpgroups {
  static constexpr int kWarpgroups = 2, kRegisters = 232, kProducerRegisters = 40;
};
struct ThreeWarpgroups {
  static constexpr int kWarpgroups = 3, kRegisters = 160, kProducerRegisters = 32;
};

// The tiles of the 16-bit forward pass.
//   kKeys      keys of a tile
//   kStages    stages of the pipeline of k, and of that of v
//   kQStages   stages of q; with two, the next tile of queries is loaded while this one is computed
//   kPingPong  true: the warpgroups issue their products in turn (ping-pong)
template <class Precision, class Dims>
struct ForwardTile;
template <class Precision>
struct ForwardTile<Precision, Dims64> : ThreeWarpgroups {
  static constexpr int kKeys = 128, kStages = 2, kQStages = 2;
  static constexpr bool kPingPong = true;
};
// What a compensated o saves takes the place of the second stage of q.
template <class Precision>
struct ForwardTile<Precision, Dims80> : ThreeWarpgroups {
  static constexpr int kKeys = 112, kStages = 2, kQStages = kCompensated<Precision> ? 1 : 2;
  static constexpr bool kPingPong = true;
};
template <class Precision>
struct ForwardTile<Precision, Dims96> : ThreeWarpgroups {
  static constexpr int kKeys = kCompensated<Precision> ? 96 : 112, kStages = 2;
  static constexpr int kQStages = kCompensated<Precision> ? 1 : 2;
  static constexpr bool kPingPong = true;
};
template <class Precision>
struct ForwardTile<Precision, Dims128> : TwoWarpgroups {
  // A tile of a mask tensor takes the place of the second stage of q.
  static constexpr int kKeys = 128, kStages = 2, kQStages = kHasMask<Precision> ? 1 : 2;
  static constexpr bool kPingPong = true;
};
template <class Precision>
struct ForwardTile<Precision, Dims160> : TwoWarpgroups {
  static constexpr int kKeys = 112, kStages = 2, kQStages = 1;
  static constexpr bool kPingPong = true;
};
template <class Precision>
struct ForwardTile<Precision, Dims192x128> : TwoWarpgroups {
  static constexpr int kKeys = 128, kStages = 2, kQStages = 1;
  static constexpr bool kPingPong = true;
};
template <class Precision>
struct ForwardTile<Precision, Dims192> : ForwardTile<Precision, Dims160> {};
template <class Precision>
struct ForwardTile<Precision, Dims256> : TwoWarpgroups {
  static constexpr int kKeys = 80, kStages = 2, kQStages = 1;
  static constexpr bool kPingPong = true;
};

template <class Precision>
struct FewKeysTile : ThreeWarpgroups {
  static constexpr int kKeys = kFewKeys, kStages = 2, kQStages = 2;
  static constexpr bool kPingPong = false;
};
template <class Precision>
struct ForwardTile<WithFewKeys<Precision>, Dims64> : FewKeysTile<Precision> {};
template <class Precision>
struct ForwardTile<WithFewKeys<Precision>, Dims80> : FewKeysTile<Precision> {};
template <class Precision>
struct ForwardTile<WithFewKeys<Precision>, Dims128> : FewKeysTile<Precision> {};

// Quantized q and k take half the bytes, and each logit takes more instructions.
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

// The tiles of the 8-bit forward pass. A consumer thread holds s (keys / 2 registers), p (keys / 8), and o with the sum
// of the rounded P (dim_v / 2 + 4). Where the scale of P changes from tile to tile, it holds a product r as large as o
// instead of that sum. Scales of keys take registers too, in the consumers and in the producer.
//   kChanges   true: the scale of P changes from tile to tile
//   kPingPong  true: the warpgroups compute their exponentials in turn (ping-pong)
//   kSkips     true: a warpgroup skips tiles that none of its queries sees
constexpr int k8BitStages = 3;  // stages of the pipeline of k and v
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
  static constexpr int kWarpgroups = kChanges ? 2 : 3, kKeys = 96, kQStages = 1;
  static constexpr int kRegisters = kChanges ? 232 : 160, kProducerRegisters = kChanges ? 40 : 32;
  static constexpr bool kPingPong = kChanges, kSkips = !kChanges;
};

// The keys of a sequence are padded to a multiple of this number, so that they are whole tiles and, where thread groups
// have scales, whole blocks of kGroupBlock tokens.
template <class Precision, class Dims>
constexpr int kLaidOutKeys = std::lcm(Forward8BitTile<Precision, Dims>::kKeys,
                                      Precision::kKeyScales == KeyScales::groups ? kGroupBlock : 1);

}  // namespace octet::cuda::sm90
