// The operands of the forward pass of int8 q and k with P and v in f16 whose products P v are summed in f16, for plain
// logits. operands.h has the list of their verbs.
#pragma once
#include "cuda/operands/v_range.h"
#include "cuda/sm80/fwd/operands_8bit.h"

namespace octet::cuda::sm80 {

// Some cards multiply f16 with sums in f16 twice as fast as with sums in float32. The products of the keys of a tile
// are summed in f16, a few channels at a time, from zero; the sums are rounded after each 16 keys and then added to o
// in float32.
//
// No sum overflows: a tile has at most 64 keys, whose P sum to at most kMaxRowSum, and |v| is at most 2^top. A P of a
// new maximum is at most 1, or 2 where float32 rounds the product of a logit and scale_log2 by so much.
template <>
struct ForwardOperands<PrecisionInt8F16Sums> : ForwardOperands<PrecisionInt8F16> {
  static constexpr int kExponent = PrecisionInt8F16Sums::kPExponent;
  static constexpr bool kStagesMasks = false, kHasPairs = false, kHasDropout = false;
  static constexpr int kMostKeys = 64;
  static constexpr float kRoundings = 1.f + 0x1p-8f;  // at most: of P, and of a sum after each 16 keys
  static_assert(PrecisionInt8F16Sums::kMaxRowSum * (1 << kRangeOfF16Sums.top) * kRoundings < 65504.f &&
                2 * kMostKeys <= PrecisionInt8F16Sums::kMaxRowSum);

  template <class Kernel>
  static __device__ void multiply_pv(const Kernel& f, const typename Kernel::P& p, int tile, typename Kernel::O& o) {
    static_assert(Kernel::kPlain && !Kernel::kPairs && Kernel::kKeys <= kMostKeys);
    constexpr int kChannels = 16, kPart = 32;
    const uint32_t lane = f.v(tile).lane_down();
#pragma unroll
    for (int n = 0; n < Kernel::Dims::kDimV / kChannels; ++n) {
      // A branch that leaves out what is padding stops ptxas from keeping the sums of all channels before it adds any.
      if (n > 0 && n * kChannels % kPart == 0 && n * kChannels >= f.a.dim_v) break;
      F16Sums<kChannels> sums[Kernel::kRowBlocks];
      mma_AB_at(lane, sums, p.x, f.v(tile), n);
#pragma unroll
      for (int block = 0; block < Kernel::kRowBlocks; ++block) sums[block].add_to(&o[block].x[kChannels / 2 * n]);
    }
  }

  template <class Softmax>
  static __device__ float origin(const Softmax& softmax, int row) {
    return softmax.template origin<kExponent>(row, softmax.m[row]);
  }
};

}  // namespace octet::cuda::sm80
