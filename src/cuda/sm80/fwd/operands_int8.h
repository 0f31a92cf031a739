// The operands of the forward pass of int8, whose P and v have 8 bits too. operands.h has the list of their verbs.
#pragma once
#include "cuda/sm80/fwd/operands_8bit.h"

namespace octet::cuda::sm80 {

// int8 q, k and v with a scale for each token, and P of unsigned 8 bits with a scale for each query and tile of keys.
// The mean of v was subtracted before the kernel; the epilogue adds it to o. Logits are logarithms, log2(p t), with the
// scales t of v (fragment/softmax_8bit.h).
template <>
struct ForwardOperands<PrecisionInt8> : ForwardOperands<PrecisionInt8F16> {
  using Base = ForwardOperands<PrecisionInt8F16>;
  template <class Dims, Logits logits, TileRows>
  using Tile = Int8Tile<Dims, logits>;
  // Keys run along rows.
  template <int Keys, int DimV>
  using TileV = SharedTile<S8, DimV, Keys>;
  template <Logits>
  using Softmax = TileScaleSoftmax;
  using WidestDims = Dims256x128;
  static constexpr bool kStagesMasks = false, kHasPairs = false;
  // A v that is not finite has a scale that is not, which a P of 0 does not meet.
  static constexpr bool kRecomputes = false, kHasDropout = false;
  template <int Rows, int Keys, int Stages>
  struct Factors : Base::Factors<Rows, Keys, Stages> {
    alignas(16) float v_log[Stages][Keys];
    alignas(16) float v_inverse[Stages][Keys];
    const float* of_v;             // those of the sequence, for each tile the logarithms and then the inverses
    const signed char* zero_of_v;  // the zero points of the sequence
  };
  template <int M, int Columns>
  struct P {
    Operand<U8, Columns> x[M];
    RowValues scale[M];
  };

  template <class Kernel>
  static __device__ void load_key_factors(const Kernel& f, int tile, const Interval& rows) {
    Base::load_key_factors(f, tile, rows);
    constexpr int kChunks = Kernel::kKeys / kChunkColumns<float>;
    const int i = ptx::opaque(static_cast<int>(threadIdx.x)), which = i / kChunks,
              key = i % kChunks * kChunkColumns<float>, stage = Kernel::stage_of(tile);
    if (which >= 2) return;
    float* const to = (which ? f.shared.factors.v_inverse : f.shared.factors.v_log)[stage] + key;
    ptx::cp_async(ptx::shared_address(to), f.shared.factors.of_v + (2 * tile + which) * Kernel::kKeys + key);
  }
  template <class Kernel>
  static __device__ void start_factors(const Kernel& f, int kv_head) {
    Base::start_factors(f, kv_head);
    const KeyPairFactorsView& keys = f.a.k_pair_factors;
    const int64_t head = int64_t{f.shared.q_tile.batch} * keys.heads + kv_head;
    f.shared.factors.of_v = f.a.v_factors_by_tiles + 2 * (head * keys.keys + first_key(f));
    if constexpr (Kernel::kGeneral) f.shared.factors.zero_of_v = f.a.v_zero_points + head * keys.keys + first_key(f);
  }
  template <class Kernel>
  static __device__ const S8* start_v(const Kernel& f, int kv_head) {
    return f.a.v.template row<S8>(f.shared.q_tile.batch, kv_head, 0) + first_key(f);
  }
  template <class Kernel>
  static __device__ const S8* source_v(const Kernel& f, int tile) {
    return Kernel::LoaderV::source(f.shared.v_start + tile * Kernel::kKeys, f.a.v.stride[2]);
  }
  template <class Kernel>
  static __device__ void load_v(const Kernel& f, const typename Kernel::TileV& tile, const S8* from, const Interval&,
                                bool) {
    Kernel::LoaderV::load(tile, from, f.a.v.stride[2]);
  }
  template <class Kernel>
  static __device__ TileScaleSoftmax start_softmax(const Kernel&, int) {
    return {};
  }

  // With plain logits s is log2(p t).
  template <class Kernel>
  static __device__ void multiply_qk(const Kernel& f, const typename Kernel::QRows& q, typename Kernel::S& s,
                                     int tile) {
    Base::multiply_qk(f, q, s, tile);
    if constexpr (Kernel::kPlain)
      each_with_log(
          f, s, tile, [&](int block) { return scale_log2(f, block); },
          [](float x, float scale, float log) { return __fmaf_rn(x, scale, log); });
  }
  // Calls f for each number of s, with `scales(block)` of its row and with log2 t of its key.
  template <class Kernel, class Scales, class F>
  static __device__ void each_with_log(const Kernel& f, typename Kernel::S& s, int tile, const Scales& scales,
                                       const F& apply) {
    const float* const v_log = f.shared.factors.v_log[Kernel::stage_of(tile)];
#pragma unroll
    for (int block = 0; block < Kernel::kRowBlocks; ++block) {
      const RowValues scale = scales(block);
#pragma unroll
      for (int i = 0; i < Kernel::kKeys / 8; ++i) {
        const float2 log = of_columns(v_log, i);
#pragma unroll
        for (int row = 0; row < kRowsPerThread; ++row) {
          float* const x = &s[block].x[4 * i + 2 * row];
          x[0] = apply(x[0], scale[row], log.x), x[1] = apply(x[1], scale[row], log.y);
        }
      }
    }
  }
  template <class Kernel>
  static __device__ void take_exp(const Kernel& f, typename Kernel::S& s, int tile, const bool&,
                                  TileScaleSoftmax (&softmax)[Kernel::kRowBlocks], typename Kernel::O& o,
                                  typename Kernel::P& p) {
    // A key that is hidden keeps its -inf, whatever its scale is.
    if constexpr (!Kernel::kPlain)
      each_with_log(
          f, s, tile,
          [&](int) {
            return RowValues{f.a.scale_log2e, f.a.scale_log2e};
          },
          [](float x, float scale, float log) { return x == -INFINITY ? x : __fmaf_rn(x, scale, log); });
    const float* const v_inverse = f.shared.factors.v_inverse[Kernel::stage_of(tile)];
#pragma unroll
    for (int block = 0; block < Kernel::kRowBlocks; ++block) {
      const RowValues most = softmax[block].largest(s[block], o[block]);
      p.scale[block] = softmax[block].quantize_p(s[block], most, v_inverse, 0.f, f.a.largest_p, p.x[block]);
    }
  }
  // Finds the products of P and the zero points of v, for each row: a v of one column, in all columns of the operand.
  template <class Kernel>
  static __device__ void multiply_zero_points(const Kernel& f, const typename Kernel::P& p, int tile,
                                              int (&products)[Kernel::kRowBlocks][kRowsPerThread]) {
    constexpr int kStep = 32;
    const auto* const words = reinterpret_cast<const uint32_t*>(f.shared.factors.zero_of_v + tile * Kernel::kKeys) +
                              static_cast<unsigned>(threadIdx.x) % 4;
#pragma unroll
    for (int block = 0; block < Kernel::kRowBlocks; ++block) {
      int sums[4] = {};
#pragma unroll
      for (int k_step = 0; k_step < Kernel::kKeys / kStep; ++k_step) {
        const uint32_t right[2] = {words[8 * k_step], words[8 * k_step + 4]};
        ptx::mma_m16n8k32<U8, S8>(sums, &p.x[block].x[4 * k_step], right);
      }
      products[block][0] = sums[0], products[block][1] = sums[2];
    }
  }
  // The scale of P changes from tile to tile, so the integers of a tile are scaled and added to o, 16 channels at a
  // time.
  template <class Kernel>
  static __device__ void multiply_pv(const Kernel& f, const typename Kernel::P& p, int tile, typename Kernel::O& o) {
    if constexpr (Kernel::kGeneral)
      if (f.a.v_zero_points) {
        int products[Kernel::kRowBlocks][kRowsPerThread];
        multiply_zero_points(f, p, tile, products);
        return add_products(f, p, tile, o, [&](int sum, int block, int row) { return sum - products[block][row]; });
      }
    add_products(f, p, tile, o, [](int sum, int, int) { return sum; });
  }
  // `corrected(sum, block, row)` is the sum of products that is scaled.
  template <class Kernel, class Corrected>
  static __device__ void add_products(const Kernel& f, const typename Kernel::P& p, int tile, typename Kernel::O& o,
                                      const Corrected& corrected) {
    constexpr int kChannels = 16;
#pragma unroll
    for (int n = 0; n < Kernel::Dims::kDimV / kChannels; ++n) {
      Accumulator<kChannels, int> sums[Kernel::kRowBlocks];
      mma_ABt(sums, p.x, f.v(tile), n, __float_as_int(kSumsBegin));
#pragma unroll
      for (int block = 0; block < Kernel::kRowBlocks; ++block)
#pragma unroll
        for (int i = 0; i < kChannels / 2; ++i) {
          float& x = o[block].x[kChannels / 2 * n + i];
          const int sum = corrected(sums[block].x[i], block, i / 2 % 2);
          x = __fmaf_rn(__int_as_float(sum) - kSumsBegin, p.scale[block][i / 2 % 2] * kUnitsOfSum, x);
        }
    }
  }

  static __device__ float origin(const TileScaleSoftmax& softmax, int row) {
    return softmax.exponent(row) - kInverseScaleLog2;
  }
  static __device__ float inverse_of(float l, float) { return l == 0.f ? 0.f : l < INFINITY ? kInverseScale / l : NAN; }
  template <class Kernel>
  static __device__ float2 v_mean(const Kernel& f, int, int channel) {
    const TileInfo& tile = f.shared.q_tile;
    const int64_t head = int64_t{tile.sequence} * (f.a.scheduler.heads / f.a.group) + tile.head / f.a.group;
    return *reinterpret_cast<const float2*>(f.a.v_mean + head * f.a.dim + channel);
  }
};

}  // namespace octet::cuda::sm80
