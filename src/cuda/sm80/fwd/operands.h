// Each precision loads, multiplies and scales the operands of the forward pass in its own way. The kernel (forward.h)
// calls these verbs of its precision, and is otherwise the same for all:
//
//   Tile               the tiles and stages of head dims, logits and rows (config.h)
//   WidestDims         the head dims of the kernel for the largest ones
//   kTiles             tiles in shared memory that hold one tile of q, of k or of v
//   kHasFactors        each token has a factor
//   kStagesMasks       there are kernels for masked logits
//   P                  P as a left operand
//   load_q_factors, load_key_factors, start_factors
//   multiply_qk        s = q k^T
//   convert            P of a row block
//   multiply_pv        o += P v
//   product, value     q.k of one key and a number of v, for rows that are computed again
#pragma once
#include <type_traits>

#include "cuda/fragment/precision.h"
#include "cuda/fragment/unmasked_row.h"
#include "cuda/scheduler/tile_scheduler.h"
#include "cuda/sm80/f16_halves.h"
#include "cuda/sm80/fwd/config.h"
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
struct ForwardOperands<PrecisionF32> {
  template <class Dims, Logits, TileRows>
  using Tile = F16HalvesTile<Dims>;
  using WidestDims = Dims256x128;
  static constexpr int kTiles = 2;
  static constexpr bool kHasFactors = true, kStagesMasks = false;
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
    if (i < Kernel::kRows) f.shared.q_factor[i] = start + i < f.rows_end() ? *factor_of(start + i) : 0.f;
  }
  template <class Kernel>
  static __device__ void load_key_factors(const Kernel& f, int tile, const Interval& rows) {
    const int stage = Kernel::stage_of(tile), key = tile * Kernel::kKeys;
    load_words_async<Kernel::kThreads, Kernel::kKeys>(f.shared.k_factor[stage], f.shared.k_factors + key, rows);
    load_words_async<Kernel::kThreads, Kernel::kKeys>(f.shared.v_factor[stage], f.shared.v_factors + key, rows);
  }
  // Finds the factors of a sequence.
  template <class Kernel>
  static __device__ void start_factors(const Kernel& f, int kv_head) {
    const TileInfo& tile = f.shared.q_tile;
    f.shared.k_factors = f.a.k_factors.at(tile.batch, kv_head, tile.k_first);
    f.shared.v_factors = f.a.v_factors.at(tile.batch, kv_head, tile.k_first);
  }

  template <class Kernel>
  static __device__ void multiply_qk(const Kernel& f, const typename Kernel::QRows&, typename Kernel::S& s, int tile) {
    const int warp = ptx::opaque(static_cast<int>(threadIdx.x)) / 32,
              lane = ptx::opaque(static_cast<int>(threadIdx.x)) % 32;
    multiply_ABt(s, HalfTiles<typename Kernel::TileQ>{f.q().data}, warp * Kernel::kRowBlocks,
                 HalfTiles<typename Kernel::TileK>{f.k(tile).data});
    const float* const of_rows = f.shared.q_factor + warp * Kernel::kRowsOfWarp + lane / 4;
    const float* const of_keys = f.shared.k_factor[Kernel::stage_of(tile)] + lane % 4 * 2;
#pragma unroll
    for (int block = 0; block < Kernel::kRowBlocks; ++block)
      times_factors(s[block], of_rows + block * kWarpRows, of_keys);
  }
  // P is multiplied by the factors of v.
  template <class Kernel>
  static __device__ void convert(const Kernel& f, const typename Kernel::SBlock& p, int block, int tile,
                                 typename Kernel::P& operand) {
    const float* const of_keys =
        f.shared.v_factor[Kernel::stage_of(tile)] + ptx::opaque(static_cast<int>(threadIdx.x)) % 4 * 2;
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
    times_factors(product, f.shared.q_factor[row - f.shared.q_tile.q_start], f.shared.k_factors[key]);
    return product;
  }
  template <class Kernel>
  static __device__ float value(const Kernel& f, const F16* v, int key, int channel) {
    const float factor = f.shared.v_factors[key];
    return from_halves(v, Kernel::Dims::kDimV, channel) * (1.f / (1 << kHalvesExponent)) * factor * factor;
  }
};

}  // namespace octet::cuda::sm80
