// The precisions of the forward pass whose q and k are int8. operands.h has the list of their verbs.
#pragma once
#include "cuda/fragment/softmax_8bit.h"
#include "cuda/operands/quantize/quantize.h"
#include "cuda/sm80/fwd/operands.h"
#include "cuda/sm80/key_factors.h"

namespace octet::cuda::sm80 {

__device__ inline float as_float(int sum) { return __int_as_float(sum); }
__device__ inline float as_float(float sum) { return sum; }

// int8 q and k with a scale for each token, P and v in f16. k is centred by its mean, so that a row of logits lacks q
// times this mean. The integer sums are no integers to the kernel: they begin at the bits of a number, and are read as
// that number plus so many units (key_factors.h).
template <>
struct ForwardOperands<PrecisionInt8F16> : ForwardOperands<PrecisionF16> {
  template <class Dims, Logits logits, TileRows rows>
  using Tile = Int8QkTile<Dims, logits, rows>;
  static constexpr bool kHasFactors = true;
  // Each sequence of keys begins at a multiple of so many in memory.
  template <class Kernel>
  static constexpr int kLaidOutKeys = Kernel::kKeys;
  // The type of sums of products, and how many are a unit of them where they are read as floats.
  template <class Kernel>
  using Sum = typename Kernel::Precision::Sum;
  template <class Kernel>
  static constexpr float kUnits = std::is_same_v<Sum<Kernel>, int> ? kUnitsOfSum : 1.f;
  template <int Rows, int Keys, int Stages>
  struct Factors {
    float q[Rows], q_log2[Rows];  // the scales, and with plain logits scale_log2 of their sums
    float q_mean_logit[Rows];     // under a softcap what the logits lack
    KeyPairFactors k[Stages][Keys / 2];
    const KeyPairFactors* of_k;  // those of the sequence
  };

  template <class Kernel>
  static __device__ void load_q_factors(const Kernel& f) {
    static_assert(Kernel::kRows <= Kernel::kThreads && 127 * 127 * Kernel::Dims::kDim < 1 << 22);
    const int i = static_cast<int>(threadIdx.x), row = f.shared.q_tile.q_start + i;
    if (i >= Kernel::kRows) return;
    float scale = 1.f, mean_logit = 0.f;
    if (row < f.rows_end()) {
      const int64_t token = int64_t{f.shared.q_tile.q_first} + f.query_of(row);
      const float of_row = *f.a.q_factors.at(f.shared.q_tile.batch, f.head_of(row), token);
      const Interval seen = f.range_of(row);
      // 0 times a logit of -inf would be NaN, and so would the scale of a row that sees nothing.
      if (of_row != 0.f && seen.first < seen.last) scale = of_row;
      if (f.a.mean_logit.data && f.a.terms.softcap != 0.f)
        mean_logit = *f.a.mean_logit.at(f.shared.q_tile.batch, f.head_of(row), token);
    }
    f.shared.factors.q[i] = scale, f.shared.factors.q_mean_logit[i] = mean_logit;
    const float log2 = f.a.scale_log2e * (scale * kUnits<Kernel>);
    f.shared.factors.q_log2[i] = log2 == 0.f ? kMinScaleLog2 : log2;
  }
  template <class Kernel>
  static __device__ void load_key_factors(const Kernel& f, int tile, const Interval&) {
    const int i = ptx::opaque(static_cast<int>(threadIdx.x));
    if (i < Kernel::kKeys / 2)
      ptx::cp_async(ptx::shared_address(&f.shared.factors.k[Kernel::stage_of(tile)][i]),
                    f.shared.factors.of_k + tile * (Kernel::kKeys / 2) + i);
  }
  template <class Kernel>
  static __device__ int first_key(const Kernel& f) {
    constexpr int kLaidOut = Kernel::Operands::template kLaidOutKeys<Kernel>;
    static_assert(kLaidOut % Kernel::kKeys == 0);
    const TileInfo& tile = f.shared.q_tile;
    return f.a.scheduler.cu_seqlens_k ? (tile.k_first / kLaidOut + tile.sequence) * kLaidOut : 0;
  }
  template <class Kernel>
  static __device__ void start_factors(const Kernel& f, int kv_head) {
    f.shared.factors.of_k = f.a.k_pair_factors.at(f.shared.q_tile.batch, kv_head, Kernel::Operands::first_key(f));
  }

  // Unsigned offsets need no register for their sign.
  template <class Kernel>
  static __device__ const F16* source_v(const Kernel& f, int tile) {
    using Loader = typename Kernel::LoaderV;
    const unsigned row = Loader::first(), column = Loader::chunk() * Loader::kChunk;
    return f.shared.v_start + tile * Kernel::kKeys * f.a.v.stride[2] + row * f.a.v.stride[2] + column;
  }

  template <class Kernel>
  static __device__ void multiply_qk(const Kernel& f, const typename Kernel::QRows& q, typename Kernel::S& s,
                                     int tile) {
    Accumulator<Kernel::kKeys, Sum<Kernel>> sums[Kernel::kRowBlocks];
    const int begin = __float_as_int(kSumsBegin), warp = static_cast<int>(threadIdx.x / 32);
    if constexpr (!std::is_same_v<Sum<Kernel>, int>)
#pragma unroll
      for (auto& each : sums) each.zero();
    if constexpr (Kernel::Tile::kQRegisters)
      mma_ABt(sums, q, f.k(tile), 0, begin);
    else
      mma_ABt(sums, f.q(), warp * Kernel::kRowBlocks, f.k(tile), 0, begin);
    const KeyPairFactors* const of_keys = f.shared.factors.k[Kernel::stage_of(tile)] +
                                          static_cast<unsigned>(ptx::opaque(static_cast<int>(threadIdx.x))) % 4;
#pragma unroll
    for (int i = 0; i < Kernel::kKeys / 8; ++i) {
      const KeyPairFactors x = of_keys[4 * i];
#pragma unroll
      for (int block = 0; block < Kernel::kRowBlocks; ++block)
#pragma unroll
        for (int row = 0; row < kRowsPerThread; ++row) {
          const int at = 4 * i + 2 * row;
          s[block].x[at] = __fmaf_rn(as_float(sums[block].x[at]), x.scale[0], x.begin[0]);
          s[block].x[at + 1] = __fmaf_rn(as_float(sums[block].x[at + 1]), x.scale[1], x.begin[1]);
        }
    }
    if constexpr (!Kernel::kPlain) times_q_scales(f, s, tile);
  }
  // Returns what q.k of a row of the tile of queries lacks in a tile of keys.
  template <class Kernel>
  static __device__ float lacking(const Kernel& f, int row, int) {
    return f.shared.factors.q_mean_logit[row];
  }
  // Returns this thread's first row of a row block in the tile. opaque() stops the compiler from keeping it in a
  // register throughout the kernel.
  template <class Kernel>
  static __device__ int row_of_tile(int block) {
    const unsigned thread = ptx::opaque(static_cast<int>(threadIdx.x));
    return thread / 32 * Kernel::kRowsOfWarp + block * kWarpRows + thread % 32 / 4;
  }
  // Turns products of quantized values of q into q.k, where more than these make a logit.
  template <class Kernel>
  static __device__ void times_q_scales(const Kernel& f, typename Kernel::S& s, int tile) {
#pragma unroll
    for (int block = 0; block < Kernel::kRowBlocks; ++block)
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) {
        const int at = row_of_tile<Kernel>(block) + 8 * row;
        const float scale = f.shared.factors.q[at] * kUnits<Kernel>, lacks = Kernel::Operands::lacking(f, at, tile);
#pragma unroll
        for (int i = 0; i < Kernel::kKeys / 8; ++i)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& x = s[block].x[4 * i + 2 * row + c];
            x = __fmaf_rn(x, scale, lacks);
          }
      }
  }
  // With plain logits the scales of queries are part of scale_log2.
  template <class Kernel>
  static __device__ RowValues scale_log2(const Kernel& f, int block) {
    if constexpr (!Kernel::kPlain) return {f.a.scale_log2e, f.a.scale_log2e};
    const float* const of_rows = f.shared.factors.q_log2 + row_of_tile<Kernel>(block);
    return {of_rows[0], of_rows[8]};
  }
  template <class Kernel>
  static __device__ auto start_softmax(const Kernel& f, int block) {
    typename Kernel::Softmax softmax;
    softmax.scale_log2 = scale_log2(f, block);
    set_softmax(f, softmax);
    return softmax;
  }
  // The scales are read again for each tile: for a late v they would have no registers in the products.
  template <class Kernel>
  static __device__ void take_exp(const Kernel& f, typename Kernel::S& s, int tile, const bool& zeros,
                                  typename Kernel::Softmax (&softmax)[Kernel::kRowBlocks], typename Kernel::O& o,
                                  typename Kernel::P& p) {
    if constexpr (Kernel::kPlain && Kernel::Tile::kLateV)
#pragma unroll
      for (int block = 0; block < Kernel::kRowBlocks; ++block) softmax[block].scale_log2 = scale_log2(f, block);
    f.take_exp(s, tile, zeros, softmax, o, p);
  }
  template <class Kernel>
  static __device__ float mean_logit(const Kernel& f, int row) {
    if (!f.a.mean_logit.data || f.a.terms.softcap != 0.f || row >= f.rows_end()) return 0.f;
    return f.a.terms.scale * *f.a.mean_logit.at(f.shared.q_tile.batch, f.head_of(row),
                                                int64_t{f.shared.q_tile.q_first} + f.query_of(row));
  }

  template <class Kernel, class T>
  static __device__ float product(const Kernel& f, const T* q, const T* k, int row, int key) {
    const int at = row - f.shared.q_tile.q_start;
    const float scale = f.shared.factors.q[at] * f.shared.factors.of_k[key / 2].scale[key % 2];
    return __fmaf_rn(dot(q, k, f.a.dim), scale, f.shared.factors.q_mean_logit[at]);
  }
};

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
    const float* of_v;  // those of the sequence, for each tile the logarithms and then the inverses
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
      p.scale[block] = softmax[block].quantize_p(s[block], most, v_inverse, 0.f, p.x[block]);
    }
  }
  // The scale of P changes from tile to tile, so the integers of a tile are scaled and added to o, 16 channels at a
  // time.
  template <class Kernel>
  static __device__ void multiply_pv(const Kernel& f, const typename Kernel::P& p, int tile, typename Kernel::O& o) {
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
          x = __fmaf_rn(__int_as_float(sums[block].x[i]) - kSumsBegin, p.scale[block][i / 2 % 2] * kUnitsOfSum, x);
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
