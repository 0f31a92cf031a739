// Every tile size, stage count and register count of the backward pass.
#pragma once

namespace octet::cuda::sm90 {

// Backward: `kQueries` per step, `kKeys` per thread block, `kStages` stages of q, `kDoStages` of do. Two
// warpgroups share the work: each has 64 keys and holds s, dp (queries / 2 registers each), dk, dv (dim / 2 each) and
// half of dq. At d = 256 a pair of thread blocks has the keys: one warpgroup of each holds s and dp of 64 keys, two dk
// and dv of 64 keys and a quarter of dq, for half of the channels.
constexpr int kBackwardWarps = 8;  // that compute
constexpr int kBackwardRegisters = 232, kBackwardProducerRegisters = 40;
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
constexpr int k2CtaProducerRegisters = 32, k2CtaPRegisters = 96, k2CtaGradientRegisters = 192;

}  // namespace octet::cuda::sm90
