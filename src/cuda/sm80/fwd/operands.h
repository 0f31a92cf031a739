// Each precision loads, multiplies and scales the operands of the forward pass in its own way. The kernel (forward.h)
// calls these verbs of its precision, and is otherwise the same for all:
//
//   Tile               the tiles and stages of head dims, logits and rows (config.h)
//   WidestDims         the head dims of the kernel for the largest ones
//   kTiles             tiles in shared memory that hold one tile of q, of k or of v
//   kHasFactors        each token has a factor
//   kStagesMasks       there are kernels for masked logits
//   Factors            what shared memory holds of the factors of tokens
//   P                  P as a left operand
//   load_q_factors, load_key_factors, start_factors
//   first_key          the row of k that is the first key of the sequence
//   multiply_qk        s = q k^T; with plain logits in units of scale_log2
//   scale_log2         exp(scale q.k) = 2^(scale_log2 s) with plain logits, for the rows of a thread
//   mean_logit         what the smoothing of k took from the logits of a row
//   convert            P of a row block
//   multiply_pv        o += P v
//   product, value     q.k of one key and a number of v, for rows that are computed again
#pragma once
#include <type_traits>

#include "cuda/fragment/precision.h"
#include "cuda/fragment/softmax_8bit.h"
#include "cuda/fragment/unmasked_row.h"
#include "cuda/scheduler/tile_scheduler.h"
#include "cuda/sm80/f16_halves.h"
#include "cuda/sm80/fwd/config.h"
#include "cuda/sm80/fwd/key_factors.h"
#include "cuda/sm80/mma.h"

namespace octet::cuda::sm80 {

// 16 bits: numbers as they are.
template <class Precision>
struct ForwardOperands {
  template <class Dims, Logits logits, TileRows rows>
  using Tile = ForwardTile<Dims, logits, rows>;
  using WidestDims = Dims256;
  static constexpr int kTiles = 1;
  static constexpr bool kHasFactors = false, kStagesMasks = true;
  template <int Rows, int Keys, int Stages>
  struct Factors {};
  template <int M, int Columns>
  struct P {
    Operand<typename Precision::PType, Columns> x[M];
  };

  template <class Kernel>
  static __device__ void load_q_factors(const Kernel&) {}
  template <class Kernel>
  static __device__ void load_key_factors(const Kernel&, int, const Interval&) {}
  template <class Kernel>
  static __device__ void start_factors(const Kernel&, int) {}
  template <class Kernel>
  static __device__ int first_key(const Kernel& f) {
    return f.shared.q_tile.k_first;
  }
  template <class Kernel>
  static __device__ RowValues scale_log2(const Kernel& f, int) {
    return {f.a.scale_log2e, f.a.scale_log2e};
  }
  template <class Kernel>
  static __device__ float mean_logit(const Kernel&, int) {
    return 0.f;
  }

  template <class Kernel>
  static __device__ void multiply_qk(const Kernel& f, const typename Kernel::QRows& q, typename Kernel::S& s,
                                     int tile) {
#pragma unroll
    for (auto& each : s) each.zero();
    if constexpr (Kernel::Tile::kQRegisters)
      mma_ABt(s, q, f.k(tile));
    else
      mma_ABt(s, f.q(), static_cast<int>(threadIdx.x) / 32 * Kernel::kRowBlocks, f.k(tile));
  }
  template <class Kernel>
  static __device__ void convert(const Kernel&, const typename Kernel::SBlock& p, int block, int,
                                 typename Kernel::P& operand) {
    cuda::convert(p, operand.x[block]);
  }
  template <class Kernel>
  static __device__ void multiply_pv(const Kernel& f, const typename Kernel::P& p, int tile, typename Kernel::O& o) {
    mma_AB(o, p.x, f.v(tile));
  }

  template <class Kernel, class T>
  static __device__ float product(const Kernel& f, const T* q, const T* k, int, int) {
    return dot(q, k, f.a.dim);
  }
  template <class Kernel, class T>
  static __device__ float value(const Kernel&, const T* v, int, int channel) {
    return float(v[channel]);
  }
};

// f32: two f16 halves of each number, and a factor of each token (sm80/f16_halves.h).
template <>
struct ForwardOperands<PrecisionF32> : ForwardOperands<PrecisionF16> {
  template <class Dims, Logits, TileRows>
  using Tile = F16HalvesTile<Dims>;
  using WidestDims = Dims256x128;
  static constexpr int kTiles = 2;
  static constexpr bool kHasFactors = true, kStagesMasks = false;
  template <int Rows, int Keys, int Stages>
  struct Factors {
    float q[Rows], k[Stages][Keys], v[Stages][Keys];
    const float *of_k, *of_v;  // those of the sequence
  };
  template <int M, int Columns>
  struct P {
    HalfOperand<M, Columns> x;
    RowValues inverse[M];  // the factors of the sums of its products
  };

  template <class Kernel>
  static __device__ void load_q_factors(const Kernel& f) {
    static_assert(Kernel::kRows <= Kernel::kThreads);
    const int start = f.shared.q_tile.q_start, i = static_cast<int>(threadIdx.x);
    const auto factor_of = [&](int row) {
      return f.a.q_factors.at(f.shared.q_tile.batch, f.head_of(row),
                              int64_t{f.shared.q_tile.q_first} + f.query_of(row));
    };
    if (i < Kernel::kRows) f.shared.factors.q[i] = start + i < f.rows_end() ? *factor_of(start + i) : 0.f;
  }
  template <class Kernel>
  static __device__ void load_key_factors(const Kernel& f, int tile, const Interval& rows) {
    const int stage = Kernel::stage_of(tile), key = tile * Kernel::kKeys;
    load_words_async<Kernel::kThreads, Kernel::kKeys>(f.shared.factors.k[stage], f.shared.factors.of_k + key, rows);
    load_words_async<Kernel::kThreads, Kernel::kKeys>(f.shared.factors.v[stage], f.shared.factors.of_v + key, rows);
  }
  // Finds the factors of a sequence.
  template <class Kernel>
  static __device__ void start_factors(const Kernel& f, int kv_head) {
    const TileInfo& tile = f.shared.q_tile;
    f.shared.factors.of_k = f.a.k_factors.at(tile.batch, kv_head, tile.k_first);
    f.shared.factors.of_v = f.a.v_factors.at(tile.batch, kv_head, tile.k_first);
  }

  template <class Kernel>
  static __device__ void multiply_qk(const Kernel& f, const typename Kernel::QRows&, typename Kernel::S& s, int tile) {
    const int warp = ptx::opaque(static_cast<int>(threadIdx.x)) / 32,
              lane = ptx::opaque(static_cast<int>(threadIdx.x)) % 32;
    multiply_ABt(s, HalfTiles<typename Kernel::TileQ>{f.q().data}, warp * Kernel::kRowBlocks,
                 HalfTiles<typename Kernel::TileK>{f.k(tile).data});
    const float* const of_rows = f.shared.factors.q + warp * Kernel::kRowsOfWarp + lane / 4;
    const float* const of_keys = f.shared.factors.k[Kernel::stage_of(tile)] + lane % 4 * 2;
#pragma unroll
    for (int block = 0; block < Kernel::kRowBlocks; ++block)
      times_factors(s[block], of_rows + block * kWarpRows, of_keys);
  }
  // P is multiplied by the factors of v.
  template <class Kernel>
  static __device__ void convert(const Kernel& f, const typename Kernel::SBlock& p, int block, int tile,
                                 typename Kernel::P& operand) {
    const float* const of_keys =
        f.shared.factors.v[Kernel::stage_of(tile)] + ptx::opaque(static_cast<int>(threadIdx.x)) % 4 * 2;
    operand.inverse[block] = to_halves(p, of_keys, operand.x.large[block], operand.x.small[block]);
  }
  template <class Kernel>
  static __device__ void multiply_pv(const Kernel& f, const typename Kernel::P& p, int tile, typename Kernel::O& o) {
    add_product<Kernel::Dims::kDimV == 64 ? 32 : 64>(o, p.x, p.inverse,
                                                     HalfTiles<typename Kernel::TileV>{f.v(tile).data});
  }

  template <class Kernel>
  static __device__ float product(const Kernel& f, const F16* q, const F16* k, int row, int key) {
    constexpr int kDim = Kernel::Dims::kDim;
    float product = 0.f;
#pragma unroll 1
    for (int c = 0; c < f.a.dim; ++c) product = fmaf(from_halves(q, kDim, c), from_halves(k, kDim, c), product);
    times_factors(product, f.shared.factors.q[row - f.shared.q_tile.q_start], f.shared.factors.of_k[key]);
    return product;
  }
  template <class Kernel>
  static __device__ float value(const Kernel& f, const F16* v, int key, int channel) {
    const float factor = f.shared.factors.of_v[key];
    return from_halves(v, Kernel::Dims::kDimV, channel) * (1.f / (1 << kHalvesExponent)) * factor * factor;
  }
};

// int8 q and k with a scale for each token, P and v in f16. k is centred by its mean, so that a row of logits lacks q
// times this mean. The integer sums are no integers to the kernel: they begin at the bits of a number, and are read as
// that number plus so many units (key_factors.h).
template <>
struct ForwardOperands<PrecisionInt8F16> : ForwardOperands<PrecisionF16> {
  template <class Dims, Logits logits, TileRows rows>
  using Tile = Int8QkTile<Dims, logits, rows>;
  static constexpr bool kHasFactors = true;
  template <int Rows, int Keys, int Stages>
  struct Factors {
    float q[Rows], q_mean_logit[Rows];  // the scales, and under a softcap what the logits lack
    KeyPairFactors k[Stages][Keys / 2];
    const KeyPairFactors* of_k;  // those of the sequence
  };

  template <class Kernel>
  static __device__ void load_q_factors(const Kernel& f) {
    static_assert(Kernel::kRows <= Kernel::kThreads && kLaidOutKeys % Kernel::kKeys == 0);
    const int i = static_cast<int>(threadIdx.x), row = f.shared.q_tile.q_start + i;
    if (i >= Kernel::kRows) return;
    float scale = 1.f, mean_logit = 0.f;
    if (row < f.rows_end()) {
      const int64_t token = int64_t{f.shared.q_tile.q_first} + f.query_of(row);
      const float of_row = *f.a.q_factors.at(f.shared.q_tile.batch, f.head_of(row), token);
      const Interval seen = f.range_of(row);
      // 0 times a logit of -inf would be NaN, and so would the scale of a row that sees nothing.
      if (of_row != 0.f && seen.first < seen.last) scale = of_row;
      if (f.a.terms.softcap != 0.f) mean_logit = *f.a.mean_logit.at(f.shared.q_tile.batch, f.head_of(row), token);
    }
    f.shared.factors.q[i] = scale, f.shared.factors.q_mean_logit[i] = mean_logit;
  }
  template <class Kernel>
  static __device__ void load_key_factors(const Kernel& f, int tile, const Interval&) {
    const int i = ptx::opaque(static_cast<int>(threadIdx.x));
    if (i < Kernel::kKeys / 2)
      ptx::cp_async(ptx::shared_address(&f.shared.factors.k[Kernel::stage_of(tile)][i]),
                    f.shared.factors.of_k + tile * (Kernel::kKeys / 2) + i);
  }
  // Each sequence of keys begins at a multiple of kLaidOutKeys.
  template <class Kernel>
  static __device__ int first_key(const Kernel& f) {
    const TileInfo& tile = f.shared.q_tile;
    return f.a.scheduler.cu_seqlens_k ? (tile.k_first / kLaidOutKeys + tile.sequence) * kLaidOutKeys : 0;
  }
  template <class Kernel>
  static __device__ void start_factors(const Kernel& f, int kv_head) {
    f.shared.factors.of_k = f.a.k_pair_factors.at(f.shared.q_tile.batch, kv_head, first_key(f));
  }

  template <class Kernel>
  static __device__ void multiply_qk(const Kernel& f, const typename Kernel::QRows& q, typename Kernel::S& s,
                                     int tile) {
    Accumulator<Kernel::kKeys, int> sums[Kernel::kRowBlocks];
#pragma unroll
    for (auto& each : sums)
#pragma unroll
      for (int& x : each.x) x = __float_as_int(kSumsBegin);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if constexpr (Kernel::Tile::kQRegisters)
      mma_ABt(sums, q, f.k(tile));
    else
      mma_ABt(sums, f.q(), warp * Kernel::kRowBlocks, f.k(tile));
    const KeyPairFactors* const of_keys =
        f.shared.factors.k[Kernel::stage_of(tile)] + ptx::opaque(static_cast<int>(threadIdx.x)) % 4;
#pragma unroll
    for (int i = 0; i < Kernel::kKeys / 8; ++i) {
      const KeyPairFactors x = of_keys[4 * i];
#pragma unroll
      for (int block = 0; block < Kernel::kRowBlocks; ++block)
#pragma unroll
        for (int row = 0; row < kRowsPerThread; ++row) {
          const int at = 4 * i + 2 * row;
          s[block].x[at] = __fmaf_rn(__int_as_float(sums[block].x[at]), x.scale[0], x.begin[0]);
          s[block].x[at + 1] = __fmaf_rn(__int_as_float(sums[block].x[at + 1]), x.scale[1], x.begin[1]);
        }
    }
    if constexpr (!Kernel::kPlain) times_q_scales(f, s);
  }
  // Turns products of quantized values of q into q.k, where more than these make a logit.
  template <class Kernel>
  static __device__ void times_q_scales(const Kernel& f, typename Kernel::S& s) {
    const int lane = ptx::opaque(static_cast<int>(threadIdx.x)) % 32,
              first = static_cast<int>(threadIdx.x) / 32 * Kernel::kRowsOfWarp + lane / 4;
#pragma unroll
    for (int block = 0; block < Kernel::kRowBlocks; ++block)
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) {
        const int at = first + block * kWarpRows + 8 * row;
        const float scale = f.shared.factors.q[at] * kUnitsOfSum, lacks = f.shared.factors.q_mean_logit[at];
#pragma unroll
        for (int i = 0; i < Kernel::kKeys / 8; ++i)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& x = s[block].x[4 * i + 2 * row + c];
            x = __fmaf_rn(x, scale, lacks);
          }
      }
  }
  template <class Kernel>
  static __device__ RowValues scale_log2(const Kernel& f, int block) {
    RowValues scales{f.a.scale_log2e, f.a.scale_log2e};
    if constexpr (Kernel::kPlain) {
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) {
        scales[row] *= f.shared.factors.q[f.thread_row(block) + 8 * row - f.shared.q_tile.q_start] * kUnitsOfSum;
        if (scales[row] == 0.f) scales[row] = kMinScaleLog2;
      }
    }
    return scales;
  }
  template <class Kernel>
  static __device__ float mean_logit(const Kernel& f, int row) {
    if (!f.a.mean_logit.data || f.a.terms.softcap != 0.f || row >= f.rows_end()) return 0.f;
    return f.a.terms.scale * *f.a.mean_logit.at(f.shared.q_tile.batch, f.head_of(row),
                                                int64_t{f.shared.q_tile.q_first} + f.query_of(row));
  }

  template <class Kernel>
  static __device__ float product(const Kernel& f, const S8* q, const S8* k, int row, int key) {
    const int at = row - f.shared.q_tile.q_start;
    const float scale = f.shared.factors.q[at] * f.shared.factors.of_k[key / 2].scale[key % 2];
    return __fmaf_rn(dot(q, k, f.a.dim), scale, f.shared.factors.q_mean_logit[at]);
  }
};

}  // namespace octet::cuda::sm80
