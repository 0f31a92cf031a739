// The precisions of the forward pass whose P and v are e4m3. Where tensor cores have no products of e4m3, all of its
// numbers are held in f16, which has them, and multiplied as such; so every GPU has these products. operands.h has the
// list of their verbs.
#pragma once
#include "cuda/fragment/codes.h"
#include "cuda/fragment/e4m3.h"
#include "cuda/operands/quantize/quantize.h"
#include "cuda/sm80/fwd/operands_8bit.h"
#include "cuda/sm80/transposed_bytes.h"

namespace octet::cuda::sm80 {

// q, k, v and P of e4m3. P is multiplied by 448 = kPFactor 2^kPExponent, and l sums the rounded P. The largest P of a
// row is exactly 1, as nothing would hide its rounding error.
struct PrecisionFp8InF16 : PrecisionF16 {
  static constexpr int kPExponent = 8;
  static constexpr float kMaxP = 0x1p8f;
  static constexpr float kPFactorLog2 = 0.807354922f;
  static constexpr bool kSumRounded = true;
};
// The same without scales. P is multiplied by nothing, and l sums P before rounding.
struct PrecisionFp8RawInF16 : PrecisionF16 {
  static constexpr int kPExponent = 0;
  static constexpr float kMaxP = 1.f;
  static constexpr float kPFactorLog2 = 0.f;
  static constexpr bool kSumRounded = false;
};
// q and k of int8.
struct PrecisionInt8Fp8InF16 : PrecisionFp8InF16 {
  using QkType = S8;
  using Sum = int;
};

// The same in bytes, multiplied as e4m3.
struct PrecisionFp8InE4m3 : PrecisionFp8InF16 {
  using QkType = E4m3;
  using PType = E4m3;
};
struct PrecisionFp8RawInE4m3 : PrecisionFp8RawInF16 {
  using QkType = E4m3;
  using PType = E4m3;
};
struct PrecisionInt8Fp8InE4m3 : PrecisionInt8Fp8InF16 {
  using PType = E4m3;
};

// Rounds two P. P in bytes are rounded as they are packed: only their sums need the rounded numbers before.
template <class Precision>
__device__ void round_p(const float (&p)[2], float* rounded) {
  if constexpr (!std::is_same_v<typename Precision::PType, E4m3>) {
    rounded[0] = round_to_e4m3(p[0]), rounded[1] = round_to_e4m3(p[1]);
  } else if constexpr (Precision::kSumRounded) {
    const float2 x = ptx::unpack<F16>(e4m3_pair(ptx::pack_e4m3(p[0], p[1])));
    rounded[0] = x.x, rounded[1] = x.y;
  } else {
    rounded[0] = p[0], rounded[1] = p[1];
  }
}

// Online softmax whose P are 2^Exponent kPFactor exp(logit - maximum), rounded to e4m3.
template <class Precision, class Base>
struct E4m3Softmax : Base {
  template <int Exponent, int Columns>
  __device__ void exp_and_sum(Accumulator<Columns>& s) {
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float m = this->m[row] == -INFINITY ? 0.f : this->m[row];
      const float from = Base::template origin<Exponent>(row, m) - Precision::kPFactorLog2;
      float sum[2] = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < Columns / 8; ++i) {
        float* const x = &s.x[4 * i + 2 * row];
        float p[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) p[c] = ptx::exp2(__fmaf_rn(x[c], this->scale_log2[row], -from));
        round_p<Precision>(p, x);
#pragma unroll
        for (int c = 0; c < 2; ++c) sum[c] += Precision::kSumRounded ? x[c] : p[c];
      }
      this->l[row] += sum[0] + sum[1];
    }
  }
};

// The verbs that these precisions share.
template <class Precision, class Base>
struct E4m3PvOperands : Base {
  template <class Dims, Logits logits, TileRows>
  using Tile = E4m3Tile<Dims, logits>;
  using WidestDims = Dims256;
  template <Logits logits>
  using Softmax = E4m3Softmax<Precision, typename Base::template Softmax<logits>>;
  static constexpr int kExponent = Precision::kPExponent;
  static constexpr bool kStagesMasks = false, kHasPairs = false, kHasPages = false, kHasHalfQueries = false;
  static constexpr bool kHasDropout = false;

  template <class Softmax>
  static __device__ float origin(const Softmax& softmax, int row) {
    return softmax.template origin<kExponent>(row, softmax.m[row]) - Precision::kPFactorLog2;
  }
};

// q and k with a scale for each token (int8: for each thread group of keys), v with one for each channel. Keys lie in
// tiles of kBlockKeys.
template <class Precision>
struct E4m3ScaledOperands : E4m3PvOperands<Precision, ForwardOperands<PrecisionInt8F16>> {
  using Base = ForwardOperands<PrecisionInt8F16>;
  template <class Kernel>
  static constexpr int kLaidOutKeys = kBlockKeys;
  template <int Rows, int Keys, int Stages>
  struct Factors : Base::Factors<Rows, Keys, Stages> {
    const float* of_channels;  // of v
  };

  template <class Kernel>
  static __device__ const F16* start_v(const Kernel& f, int kv_head) {
    return f.a.v.template row<F16>(f.shared.q_tile.batch, kv_head, Base::first_key(f));
  }
  template <class Kernel>
  static __device__ void start_factors(const Kernel& f, int kv_head) {
    Base::start_factors(f, kv_head);
    const int64_t head = int64_t{f.shared.q_tile.sequence} * (f.a.scheduler.heads / f.a.group) + kv_head;
    f.shared.factors.of_channels = f.a.v_channel_scale + head * f.a.dim;
  }
  template <class Kernel>
  static __device__ float2 v_factor(const Kernel& f, int channel) {
    return *reinterpret_cast<const float2*>(f.shared.factors.of_channels + channel);
  }
};

// Products of e4m3, whose sums have 13 bits in tensor cores (SageAttention 2, arXiv 2411.10958): the sums of a tile of
// keys start from zero and are added to o in float32.
template <class Precision, class InF16>
struct E4m3ProductOperands : InF16 {
  template <class Dims, Logits logits, TileRows>
  using Tile = E4m3ProductTile<Dims, logits>;
  template <int Keys, int DimV>
  using TileV = SharedTile<E4m3, Keys, DimV>;
  template <int M, int Columns>
  struct P {
    Operand<E4m3, Columns> x[M];
  };

  template <class Kernel>
  static __device__ const E4m3* start_v(const Kernel& f, int kv_head) {
    return f.a.v.template row<E4m3>(f.shared.q_tile.batch, kv_head, InF16::first_key(f));
  }
  template <class Kernel>
  static __device__ void convert(const Kernel&, const typename Kernel::SBlock& p, int block, int,
                                 typename Kernel::P& operand) {
    pack_P(p, operand.x[block]);
  }
  template <class Kernel>
  static __device__ void multiply_pv(const Kernel& f, const typename Kernel::P& p, int tile, typename Kernel::O& o) {
    constexpr int kChannels = 32;
    const uint32_t lane = f.v(tile).lane_down();
#pragma unroll
    for (int n = 0; n < Kernel::Dims::kDimV / kChannels; ++n) {
      // This branch leaves out channels that are padding. It also stops ptxas from holding the sums of all channels at
      // once, which would spill registers.
      if (n > 0 && n * kChannels >= f.a.dim_v) break;
      add_AB_of_bytes(lane, o, p.x, f.v(tile), n);
    }
  }
  template <class O>
  static __device__ void order_channels(O& o) {
    order_channels_of_bytes(o);
  }
};

template <>
struct ForwardOperands<PrecisionFp8InF16> : E4m3ScaledOperands<PrecisionFp8InF16> {};
template <>
struct ForwardOperands<PrecisionInt8Fp8InF16> : E4m3ScaledOperands<PrecisionInt8Fp8InF16> {};
template <>
struct ForwardOperands<PrecisionFp8RawInF16> : E4m3PvOperands<PrecisionFp8RawInF16, ForwardOperands<PrecisionF16>> {};

template <>
struct ForwardOperands<PrecisionFp8InE4m3>
    : E4m3ProductOperands<PrecisionFp8InE4m3, E4m3ScaledOperands<PrecisionFp8InE4m3>> {};
template <>
struct ForwardOperands<PrecisionInt8Fp8InE4m3>
    : E4m3ProductOperands<PrecisionInt8Fp8InE4m3, E4m3ScaledOperands<PrecisionInt8Fp8InE4m3>> {};
template <>
struct ForwardOperands<PrecisionFp8RawInE4m3>
    : E4m3ProductOperands<PrecisionFp8RawInE4m3, E4m3PvOperands<PrecisionFp8RawInE4m3, ForwardOperands<PrecisionF16>>> {
};

}  // namespace octet::cuda::sm80
