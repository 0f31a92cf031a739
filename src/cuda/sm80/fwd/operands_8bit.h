// The precisions of the forward pass whose q and k are int8. operands.h has the list of their verbs.
#pragma once
#include <bit>

#include "cuda/fragment/softmax_8bit.h"
#include "cuda/operands/quantize/block_logits.h"
#include "cuda/operands/quantize/quantize.h"
#include "cuda/operands/quantize/zero_point.h"
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
  using WidestDims = Dims256;
  static constexpr bool kHasFactors = true, kHasPages = false, kHasHalfQueries = false;
  // Each sequence of keys begins at a multiple of so many in memory.
  template <class Kernel>
  static constexpr int kLaidOutKeys = Kernel::kLoadedKeys;
  // The type of sums of products, and how many are a unit of them where they are read as floats.
  template <class Kernel>
  using Sum = typename Kernel::Precision::Sum;
  template <class Kernel>
  static constexpr float kUnits = std::is_same_v<Sum<Kernel>, int> ? kUnitsOfSum : 1.f;
  // Whether q and k may come as codes, and whether a kernel has what sums of products may need: the zero points of
  // codes, and what they lack where q was centred.
  static constexpr bool kTakesCodes = true;
  template <class Kernel>
  static constexpr bool kCorrectsSums = std::is_same_v<Sum<Kernel>, int> &&
                                        (Kernel::kGeneral && Kernel::Operands::kTakesCodes);
  template <int Rows, int Keys, int Stages>
  struct Factors {
    float q[Rows];  // the scales
    union {
      float q_log2[Rows];      // with plain logits: scale_log2 of their sums
      ZeroPoint q_zero[Rows];  // with general ones
    };
    float q_mean_logit[Rows];  // under a softcap what the logits lack
    KeyPairFactors k[Stages][Keys / 2];
    const KeyPairFactors* of_k;  // those of the sequence
    const ZeroPoint* zero_of_k;  // likewise
    const float* block_logits;   // those of the block of queries; null: none
  };

  template <class Kernel>
  static __device__ void load_q_factors(const Kernel& f) {
    static_assert(Kernel::kRows <= Kernel::kThreads && 127 * 127 * Kernel::Dims::kDim < 1 << 22);
    const int i = static_cast<int>(threadIdx.x), row = f.shared.q_tile.q_start + i;
    if (i >= Kernel::kRows) return;
    float scale = 1.f, mean_logit = 0.f;
    ZeroPoint zero{0};
    if (row < f.rows_end()) {
      const int64_t token = int64_t{f.shared.q_tile.q_first} + f.query_of(row);
      const float* const factor = f.a.q_factors.at(f.shared.q_tile.batch, f.head_of(row), token);
      const float of_row = *factor;
      if constexpr (kCorrectsSums<Kernel>)
        if (f.a.q_zero_points) zero = f.a.q_zero_points[factor - f.a.q_factors.data];
      const Interval seen = f.range_of(row);
      // 0 times a logit of -inf would be NaN, and so would the scale of a row that sees nothing.
      if (of_row != 0.f && seen.first < seen.last) scale = of_row;
      if (f.a.mean_logit.data && f.a.terms.softcap != 0.f)
        mean_logit = *f.a.mean_logit.at(f.shared.q_tile.batch, f.head_of(row), token);
    }
    f.shared.factors.q[i] = scale, f.shared.factors.q_mean_logit[i] = mean_logit;
    if constexpr (kCorrectsSums<Kernel>) {
      f.shared.factors.q_zero[i] = zero;
      return;
    }
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
  // The same for two tiles, whose stages lie one behind the other.
  template <class Kernel>
  static __device__ void load_pair_factors(const Kernel& f, int pair) {
    const unsigned i = static_cast<unsigned>(ptx::opaque(static_cast<int>(threadIdx.x)));
    if (i < Kernel::kKeys)
      ptx::cp_async(ptx::shared_address(&f.shared.factors.k[2 * (static_cast<unsigned>(pair) % 2)][i]),
                    f.shared.factors.of_k + (static_cast<unsigned>(pair * Kernel::kKeys) + i));
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
    const KeyPairFactors* const pairs =
        f.a.k_pair_factors.at(f.shared.q_tile.batch, kv_head, Kernel::Operands::first_key(f));
    f.shared.factors.of_k = pairs;
    if constexpr (kCorrectsSums<Kernel>) {
      f.shared.factors.zero_of_k = f.a.k_zero_points + 2 * (pairs - f.a.k_pair_factors.data);
      f.shared.factors.block_logits = block_logits(f);
    }
  }
  template <class Kernel>
  static __device__ const float* block_logits(const Kernel& f) {
    const auto& all = f.a.block_logits;
    const TileInfo& tile = f.shared.q_tile;
    if (Kernel::kPairs || !all.data) return nullptr;
    const int first = f.a.scheduler.cu_seqlens_k ? tile.q_first / kSmoothedQueries + tile.sequence : 0;
    const int64_t block =
        (int64_t{tile.batch} * f.a.scheduler.heads + tile.head) * all.blocks + first + tile.q_start / kSmoothedQueries;
    static_assert(kSmoothedQueries % Kernel::kRows == 0);
    return all.data + block * all.keys;
  }

  // Unsigned offsets need no register for their sign.
  template <class Kernel>
  static __device__ const auto* source_v(const Kernel& f, int tile) {
    using Loader = typename Kernel::LoaderV;
    const unsigned row = Loader::first(), column = Loader::chunk() * Loader::kChunk;
    return f.shared.v_start + tile * Kernel::kKeys * f.a.v.stride[2] + row * f.a.v.stride[2] + column;
  }

  template <class Kernel>
  using Sums = Accumulator<Kernel::kKeys, Sum<Kernel>>[Kernel::kRowBlocks];
  static constexpr int kBegin = std::bit_cast<int>(kSumsBegin);  // the bits of what integer sums begin at
  template <class Kernel>
  static __device__ void multiply_qk(const Kernel& f, const typename Kernel::QRows& q, typename Kernel::S& s,
                                     int tile) {
    Sums<Kernel> sums;
    const int warp = static_cast<int>(threadIdx.x / 32);
    if constexpr (!std::is_same_v<Sum<Kernel>, int>)
#pragma unroll
      for (auto& each : sums) each.zero();
    if constexpr (Kernel::Tile::kQRegisters)
      mma_ABt(sums, q, f.k(tile), 0, kBegin);
    else
      mma_ABt(sums, f.q(), warp * Kernel::kRowBlocks, f.k(tile), 0, kBegin);
    take_sums(f, sums, s, tile);
  }
  // Turns sums of products into logits.
  template <class Kernel>
  static __device__ void take_sums(const Kernel& f, Sums<Kernel>& sums, typename Kernel::S& s, int tile) {
    if constexpr (kCorrectsSums<Kernel>)
      if (f.a.k_zero_points) subtract_zero_points(f, sums, tile);
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
    if constexpr (kCorrectsSums<Kernel> && !Kernel::kPairs)
      if (f.shared.factors.block_logits) add_block_logits(f, s, tile);
  }
  // Adds what q.k lacks where q was centred.
  template <class Kernel>
  static __device__ void add_block_logits(const Kernel& f, typename Kernel::S& s, int tile) {
    const float2* const of_keys =
        reinterpret_cast<const float2*>(f.shared.factors.block_logits + tile * Kernel::kKeys) +
        static_cast<unsigned>(ptx::opaque(static_cast<int>(threadIdx.x))) % 4;
#pragma unroll
    for (int i = 0; i < Kernel::kKeys / 8; ++i) {
      const float2 x = of_keys[4 * i];
#pragma unroll
      for (auto& block : s)
#pragma unroll
        for (int row = 0; row < kRowsPerThread; ++row)
          block.x[4 * i + 2 * row] += x.x, block.x[4 * i + 2 * row + 1] += x.y;
    }
  }
  // Takes what zero points add from sums of products, in integers. Then the sums, of up to 24 bits, are floats, whose
  // factors begin at 0.
  template <class Kernel, class Sums>
  static __device__ void subtract_zero_points(const Kernel& f, Sums& sums, int tile) {
    const int2* const of_keys = reinterpret_cast<const int2*>(f.shared.factors.zero_of_k + tile * Kernel::kKeys) +
                                static_cast<unsigned>(ptx::opaque(static_cast<int>(threadIdx.x))) % 4;
#pragma unroll
    for (int i = 0; i < Kernel::kKeys / 8; ++i) {
      const int2 words = of_keys[4 * i];
      const ZeroPoint of_key[] = {{words.x}, {words.y}};
#pragma unroll
      for (int block = 0; block < Kernel::kRowBlocks; ++block)
#pragma unroll
        for (int row = 0; row < kRowsPerThread; ++row) {
          const ZeroPoint of_row = f.shared.factors.q_zero[row_of_tile<Kernel>(block) + 8 * row];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            int& x = sums[block].x[4 * i + 2 * row + c];
            x = __float_as_int(static_cast<float>(x - __float_as_int(kSumsBegin) - excess(of_row, of_key[c])) *
                               (1.f / kUnitsOfSum));
          }
        }
    }
  }
  // Returns what a sum of products of codes has too much.
  static __device__ int excess(ZeroPoint q, ZeroPoint k) { return q.zero() * k.sum() + k.zero() * q.sum(); }
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
    float sum = dot(q, k, f.a.dim);
    if constexpr (kCorrectsSums<Kernel>)
      if (f.a.k_zero_points)
        sum -= static_cast<float>(excess(f.shared.factors.q_zero[at], f.shared.factors.zero_of_k[key]));
    float lacks = f.shared.factors.q_mean_logit[at];
    if constexpr (kCorrectsSums<Kernel> && !Kernel::kPairs)
      if (f.shared.factors.block_logits) lacks += f.shared.factors.block_logits[key];
    return __fmaf_rn(sum, scale, lacks);
  }
};

}  // namespace octet::cuda::sm80
