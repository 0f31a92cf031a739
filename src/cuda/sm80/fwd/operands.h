// Each precision loads, multiplies and scales the operands of the forward pass in its own way. The kernel (forward.h)
// calls these verbs of its precision, and is otherwise the same for all:
//
//   Tile, TileV        the tiles and stages of head dims, logits and rows (config.h), and a tile of v in shared memory
//   WidestDims         the head dims of the kernel for the largest ones
//   kTiles             tiles in shared memory that hold one tile of q, of k or of v
//   kExponent          P is multiplied by 2^kExponent
//   kHasFactors        each token has a factor
//   kStagesMasks       there are kernels for masked logits
//   kHasHalfQueries    there are kernels with half as many queries in a tile, and for few rows, for head dims up to 128
//   kHasPairs          there are kernels for few queries
//   kHasPages          also where k and v lie in pages
//   kRecomputes        an inf or NaN of v that a mask hides may reach a row, which is then computed again
//   kHasDropout        kernels with general logits have dropout
//   kConvertsQ         load_q_factors also loads q
//   KType              the elements of k, if they are not those of q
//   Factors            the factors of tokens in shared memory
//   P, Softmax         P as a left operand, and the online softmax of the rows of a thread
//   load_q_factors, load_key_factors, load_paged_factors, start_factors
//   first_key          the row of k that is the first key of the sequence
//   start_v, source_v, load_v
//   start_softmax
//   multiply_qk        s = q k^T; with plain logits exp(scale q.k) = 2^(scale_log2 s)
//   shift_max, unshift_max   move the maximum by what all logits of a tile lack, and back
//   take_exp           turns logits into P
//   convert            P of a row block
//   drop_from          takes the elements that dropout drops from P of a row block
//   multiply_pv        o += P v
//   mean_logit         what the smoothing of k took from the logits of a row
//   unit_of, join_units   the unit of o, where it has one, and that of two warps' o
//   order_channels     puts o into the order of an accumulator
//   origin, inverse_of, v_factor, v_mean
//                      the end of a row: sum of exp(logit) = 2^origin l, o = o inverse_of(l) v_factor + v_mean
//   product, value     q.k of one key and a number of v, for rows that are computed again
#pragma once
#include <bit>
#include <type_traits>

#include "cuda/fragment/dropout.h"
#include "cuda/fragment/precision.h"
#include "cuda/fragment/softmax.h"
#include "cuda/fragment/unmasked_row.h"
#include "cuda/scheduler/tile_scheduler.h"
#include "cuda/sm80/f16_halves.h"
#include "cuda/sm80/fwd/config.h"
#include "cuda/sm80/mma.h"

namespace octet::cuda::sm80 {

// P over the stale maximum are kept while they are at most this; where exponentials do not wait for a look at the
// maximum, while their sums in a thread are, which is one of four that share a row.
template <class Precision, class Tile>
constexpr float max_p() {
  if constexpr (requires { Precision::kMaxRowSum; })
    return Precision::kMaxRowSum / static_cast<float>(Tile::kRepeats ? 4 : Tile::kKeys);
  else
    return Precision::kMaxP;
}

// The largest power of two that is no more, by its exponent. With general logits the largest P is exactly 1 (times
// 2^kPExponent): they may leave a row one key, whose rounding error nothing would hide.
template <class Precision, class Tile, Logits logits>
constexpr float kMaxPLog2 = logits != Logits::plain
                                ? Precision::kPExponent
                                : std::bit_width(static_cast<unsigned>(max_p<Precision, Tile>())) - 1;

// 16 bits: numbers as they are.
template <class Precision>
struct ForwardOperands {
  template <class Dims, Logits logits, TileRows rows>
  using Tile = ForwardTile<Dims, logits, rows>;
  template <int Keys, int DimV>
  using TileV = SharedTile<typename Precision::PType, Keys, DimV>;
  template <Logits logits>
  using Softmax = std::conditional_t<logits == Logits::general, ShiftedSoftmax, OnlineSoftmax>;
  using WidestDims = Dims512;
  template <class Precision_>
  using KType = typename Precision_::QkType;
  static constexpr int kTiles = 1, kExponent = Precision::kPExponent;
  static constexpr bool kHasFactors = false, kStagesMasks = true, kHasPairs = !kCompensated<Precision>;
  static constexpr bool kHasPages = kHasPairs, kHasHalfQueries = kHasPairs;
  static constexpr bool kRecomputes = true, kHasDropout = true, kConvertsQ = false;
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
    return Kernel::kPaged ? 0 : f.shared.q_tile.k_first;
  }
  template <class Kernel>
  static __device__ const auto* start_v(const Kernel& f, int kv_head) {
    return f.a.v.template row<typename Precision::PType>(f.first_page(), kv_head, first_key(f));
  }
  // Returns where this thread starts in a tile of v.
  template <class Kernel>
  static __device__ const auto* source_v(const Kernel& f, int tile) {
    return Kernel::LoaderV::source(f.shared.v_start + tile * Kernel::kKeys * f.a.v.stride[2], f.a.v.stride[2]);
  }
  // Loads a tile of v, whose rows outside of `rows` become zeros unless it is `whole`.
  template <class Kernel, class T>
  static __device__ void load_v(const Kernel& f, const typename Kernel::TileV& tile, const T* from,
                                const Interval& rows, bool whole) {
    if (whole)
      Kernel::LoaderV::load(tile, from, f.a.v.stride[2]);
    else
      Kernel::LoaderV::load_part(tile, from, f.a.v.stride[2], rows, f.a.dim_v);
  }
  template <class Kernel>
  static __device__ auto start_softmax(const Kernel& f, int) {
    typename Kernel::Softmax softmax;
    softmax.scale_log2 = {f.a.scale_log2e, f.a.scale_log2e};
    set_softmax(f, softmax);
    return softmax;
  }
  template <class Kernel>
  static __device__ void set_softmax(const Kernel& f, typename Kernel::Softmax& softmax) {
    if constexpr (Kernel::kGeneral) softmax.beta = f.a.beta, softmax.limit = f.a.beta_limit;
    // Smaller logits, as of the smallest number of the mask's type, have a P of 0 beside any other key.
    if constexpr (Kernel::kMasked) softmax.m = {-0x1p127f, -0x1p127f};
  }
  template <class Kernel>
  static __device__ float mean_logit(const Kernel&, int) {
    return 0.f;
  }

  template <class Kernel>
  static __device__ void multiply_qk(const Kernel& f, const typename Kernel::QRows& q, typename Kernel::S& s,
                                     int tile) {
    if constexpr (Kernel::kChannelWarps > 1) {
      f.multiply_qk_by_channels(q, s, tile);
    } else {
#pragma unroll
      for (auto& each : s) each.zero();
      const int keys = Kernel::key_part() * (Kernel::kWarpKeys / 16);
      if constexpr (Kernel::Tile::kQRegisters)
        mma_ABt(s, q, f.k(tile), keys);
      else
        mma_ABt(s, f.q(), static_cast<int>(threadIdx.x) / (32 * Kernel::kKeyWarps) * Kernel::kRowBlocks, f.k(tile),
                keys);
    }
  }
  struct Shift {};
  template <class Kernel>
  static __device__ Shift shift_max(const Kernel&, typename Kernel::Softmax (&)[Kernel::kRowBlocks], int) {
    return {};
  }
  template <class Softmaxes>
  static __device__ void unshift_max(const Shift&, Softmaxes&) {}
  template <class Kernel>
  static __device__ void take_exp(const Kernel& f, typename Kernel::S& s, int tile, const bool& zeros,
                                  typename Kernel::Softmax (&softmax)[Kernel::kRowBlocks], typename Kernel::O& o,
                                  typename Kernel::P& p) {
    f.take_exp(s, tile, zeros, softmax, o, p);
  }
  template <class Kernel>
  static __device__ void convert(const Kernel&, const typename Kernel::SBlock& p, int block, int,
                                 typename Kernel::P& operand) {
    cuda::convert(p, operand.x[block]);
  }
  template <class P, class Kept>
  static __device__ void drop_from(P& p, int block, const Kept& kept) {
    drop(p.x[block], kept);
  }
  template <class Kernel>
  static __device__ void multiply_pv(const Kernel& f, const typename Kernel::P& p, int tile, typename Kernel::O& o) {
    mma_AB(o, p.x, f.v(tile), Kernel::first_channel() / 16, Kernel::key_part() * (Kernel::kWarpKeys / 16));
  }

  template <class Softmax>
  static __device__ float unit_of(const Softmax&) {
    return 1.f;
  }
  template <class Softmax>
  static __device__ void join_units(Softmax&, float, RowValues&, RowValues&) {}
  template <class O>
  static __device__ void order_channels(O&) {}
  template <class Softmax>
  static __device__ float origin(const Softmax& softmax, int row) {
    return softmax.template origin<kExponent>(row, softmax.m[row]);
  }
  static __device__ float inverse_of(float l, float v_scale) { return l == 0.f ? 0.f : v_scale / l; }
  // Return the factors of two channels of v and their means, from `channel` on.
  template <class Kernel>
  static __device__ float2 v_factor(const Kernel&, int) {
    return {1.f, 1.f};
  }
  template <class Kernel>
  static __device__ float2 v_mean(const Kernel& f, int kv, int channel) {
    if constexpr (kCompensated<Precision>)
      return *reinterpret_cast<const float2*>(f.a.v_mean + int64_t{kv} * Kernel::Dims::kDimV + channel);
    return {0.f, 0.f};
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
  static constexpr bool kHasFactors = true, kStagesMasks = false, kHasPages = false, kHasHalfQueries = false;
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
  template <class P, class Kept>
  static __device__ void drop_from(P& p, int block, const Kept& kept) {
    drop(p.x.large[block], kept), drop(p.x.small[block], kept);
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

}  // namespace octet::cuda::sm80
