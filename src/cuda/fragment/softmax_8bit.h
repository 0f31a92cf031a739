// Online softmax with P of 8 bits, for the two rows of a thread. x is a logit without softmax_scale and the scale of
// its query, and, where keys have scales by groups, without that of its key: exp(logit) = 2^(scale_log2 scale x).
//
// P of 8 bits need not be exactly 1 at the maximum, so scaling and subtraction are one fma.
#pragma once
#include <type_traits>

#include "cuda/fragment/precision.h"
#include "cuda/fragment/rows.h"
#include "cuda/ptx/types.h"

namespace octet::cuda {

// The smallest scale_log2, which replaces those that underflow: 0 times a logit of -inf would be NaN.
constexpr float kMinScaleLog2 = 0x1p-149f;

// Returns the numbers of columns 8 i + fragment_column() and the next in an array in shared memory.
__device__ inline float2 of_columns(const float* array, int i) {
  return *reinterpret_cast<const float2*>(array + 8 * i + fragment_column());
}

// Converts sums to float. Sums in float share their registers with x and stay as they are.
template <class Sum, int Columns>
__device__ void to_floats(const Accumulator<Columns, Sum>& sums, Accumulator<Columns>& x) {
  if constexpr (!std::is_same_v<Sum, float>)
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i) x.x[i] = static_cast<float>(sums.x[i]);
}

// Returns the accumulator that to_floats writes: that of the sums if these are floats, else `converted`.
template <int Columns>
__device__ Accumulator<Columns>& in_place(Accumulator<Columns>& sums, Accumulator<Columns>&) {
  return sums;
}
template <int Columns>
__device__ Accumulator<Columns>& in_place(Accumulator<Columns, int>&, Accumulator<Columns>& converted) {
  return converted;
}

// Multiplies x by the scale of each key.
template <int Columns>
__device__ void scale_columns(Accumulator<Columns>& x, const float* scales) {
#pragma unroll
  for (int i = 0; i < Columns / 8; ++i) {
    const float2 scale = of_columns(scales, i);
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) x.x[4 * i + 2 * row] *= scale.x, x.x[4 * i + 2 * row + 1] *= scale.y;
  }
}

// Scales of this thread's columns in an accumulator: `Count` scales, each for the same number of columns.
template <int Count>
struct ColumnScales {
  float x[Count];
  template <int Columns>
  __device__ float of(int i) const {  // the scale of element i of an accumulator
    return x[i / (Columns / 2 / Count)];
  }
};
__device__ inline ColumnScales<1> no_scales() { return {{1.f}}; }

// The number of group scales (precision.h) that a tile of keys needs: four for each block of 64 tokens that it meets.
template <int Columns>
constexpr int kGroupScales = (Columns + kGroupBlock - 1) / kGroupBlock* kScaleGroups;

// Returns the scales of this thread's columns in tile number `tile`, whose columns are keys, from the scales of the
// blocks that it meets, [block, group]. Where a tile is an odd number of half blocks, tiles of odd numbers start in the
// middle of a block.
template <int Columns>
__device__ auto scales_of_groups(const float* scales, int tile) {
  constexpr bool kHalves = Columns % kGroupBlock != 0;
  constexpr int kOfScale = kHalves ? kGroupBlock / 2 : kGroupBlock;  // columns that share a scale
  constexpr int kBlocks = kGroupScales<Columns> / kScaleGroups;
  static_assert(Columns % kOfScale == 0);
  float of_block[kBlocks];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) of_block[i] = scales[i * kScaleGroups + threadIdx.x % kScaleGroups];
  ColumnScales<Columns / kOfScale> columns;
#pragma unroll
  for (int i = 0; i < Columns / kOfScale; ++i)
    columns.x[i] = kHalves && tile % 2 ? of_block[(i + 1) / 2] : of_block[kHalves ? i / 2 : i];
  return columns;
}

// Softmax for P without scales: p = 2^(scale_log2 scale x + shift), where all logits that share a scale share the
// product scale_log2 scale. Any shift gives the same result as long as no p leaves its format. A row therefore keeps
// the shift of its first tile, where its largest p was kStart, until a p exceeds the largest number of the format.
template <class Precision>
struct SharedScaleSoftmax {
  RowValues scale_log2;
  RowValues shift{INFINITY, INFINITY};  // INFINITY: the row has seen no key, so no p fits
  RowValues l{0.f, 0.f};  // sum over this thread's columns; unused with kSumRounded, where the product with v sums P

  // The sum of exp(logit) is 2^exponent l.
  __device__ float exponent(int row) const { return -shift[row]; }

  // Turns x into p over the shift that the rows have. Returns true if all p of the warp fit into the format. All
  // threads of the warp call it together.
  template <int Columns, int Scales>
  __device__ bool exp_stale_max(Accumulator<Columns>& x, const ColumnScales<Scales>& scales, RowValues& sum) const {
    sum = exponentials(x, scales);
    int most = 0;  // non-negative floats compare as their bits do, and NaN compares above all
#pragma unroll
    for (int i = 0; i < Columns / 2; i += 2) most = max(max(__float_as_int(x.x[i]), __float_as_int(x.x[i + 1])), most);
    return !__any_sync(~0u, most > __float_as_int(448.f));
  }

  // Turns x into p over a new shift; returns the factors by which sums over the former one must be multiplied. A scale
  // of 0 counts as 1, because x may be -inf and 0 times -inf is NaN.
  template <int Columns, int Scales>
  __device__ RowValues exp_update_max(Accumulator<Columns>& x, ColumnScales<Scales> scales, RowValues& sum) {
#pragma unroll
    for (float& scale : scales.x) scale = scale == 0.f ? 1.f : scale;
    RowValues largest{-INFINITY, -INFINITY}, rescale;
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i)
      largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], x.x[i] * scales.template of<Columns>(i));
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float most = quad_max(largest[row]);
      const float former = shift[row];
      if (most != -INFINITY) shift[row] = fminf(former, log2f(Precision::kStart) - most * scale_log2[row]);
      rescale[row] = former == INFINITY ? 1.f : ptx::exp2(shift[row] - former);
      l[row] *= rescale[row];
    }
    // A row that has still seen no key gets P of 2^-inf = 0.
    const RowValues shifts = shift;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row)
      if (shift[row] == INFINITY) shift[row] = 0.f;
    sum = exponentials(x, scales);
    shift = shifts;
    return rescale;
  }

 private:
  // Replaces x by p; returns the row sums of p before rounding.
  template <int Columns, int Scales>
  __device__ RowValues exponentials(Accumulator<Columns>& x, const ColumnScales<Scales>& scales) const {
    RowValues sum{0.f, 0.f};
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i) {
      const int row = i / 2 % 2;
      x.x[i] = ptx::exp2(__fmaf_rn(x.x[i], scale_log2[row] * scales.template of<Columns>(i), shift[row]));
      if constexpr (!Precision::kSumRounded) sum[row] += x.x[i];
    }
    return sum;
  }
};

// The largest code of P, and how quantizing P takes it.
struct LargestCode {
  float log2, inverse;
  static __host__ __device__ LargestCode of(float code) { return {log2f(code), 1.f / code}; }
};
constexpr float kLargestU8 = 255.f, kLargestS8 = 127.f;

// Softmax for P times t, the scales of the tokens of v, quantized with one scale for each row and tile: the largest
// code stands for the largest p t of the tile. The maximum and the exponentials are taken of logarithms, log2(p t) =
// scale_log2 x + log2 t, so neither a maximum of logits nor a product with t is needed; l sums p t times 1 / t.
//
// Sums over all tiles are in units of 2^base. A tile's scale may be any float, so base stays until it is far too small.
struct TileScaleSoftmax {
  RowValues scale_log2;
  RowValues base{-INFINITY, -INFINITY};
  RowValues l{0.f, 0.f};  // sum over this thread's columns

  // The sum of exp(logit) is 2^exponent l.
  __device__ float exponent(int row) const { return base[row]; }

  // Sets x to log2(p t).
  template <int Columns>
  __device__ void add_log_scales(Accumulator<Columns>& x, const float* v_log) const {
#pragma unroll
    for (int i = 0; i < Columns / 8; ++i) {
      const float2 log = of_columns(v_log, i);
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) {
        float* y = &x.x[4 * i + 2 * row];
        y[0] = __fmaf_rn(y[0], scale_log2[row], log.x), y[1] = __fmaf_rn(y[1], scale_log2[row], log.y);
      }
    }
  }

  // Returns the largest number of each row; rescales o where a new base is needed. All threads of a warp call it
  // together.
  template <int Columns, int OColumns>
  __device__ RowValues largest(const Accumulator<Columns>& x, Accumulator<OColumns>& o) {
    RowValues most;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) most[row] = quad_max(row_max(x, row, -INFINITY));
    if (__any_sync(~0u, must_update_base(most))) scale_rows(o, update_base(most));
    return most;
  }

  // Quantizes P from its logarithms; returns its scales. `zero` is 0; the exponentials wait for whatever computes it.
  template <int Columns>
  __device__ RowValues quantize_p(Accumulator<Columns>& x, const RowValues& most, const float* v_inverse, float zero,
                                  const LargestCode& top, Operand<U8, Columns>& p) {
    RowValues scales, shift, sum{0.f, 0.f};
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const bool any = most[row] != -INFINITY;
      shift[row] = top.log2 - (any ? most[row] : 0.f) + zero;
      scales[row] = any ? ptx::exp2(most[row] - base[row]) * top.inverse : 0.f;
    }
#pragma unroll
    for (int i = 0; i < Columns / 8; ++i) {
      const float2 inverse = of_columns(v_inverse, i);
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) {
        float* y = &x.x[4 * i + 2 * row];
        y[0] = ptx::exp2(y[0] + shift[row]), y[1] = ptx::exp2(y[1] + shift[row]);
        sum[row] = __fmaf_rn(y[0], inverse.x, sum[row]);
        sum[row] = __fmaf_rn(y[1], inverse.y, sum[row]);
      }
    }
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) l[row] = __fmaf_rn(sum[row], scales[row], l[row]);
    pack_P(x, p);
    return scales;
  }

 private:
  // Returns true if the largest number of a tile is far above base.
  __device__ bool must_update_base(const RowValues& most) const {
    constexpr float kMostAboveBase = 60.f;
    return most[0] > base[0] + kMostAboveBase || most[1] > base[1] + kMostAboveBase;  // true also where base is -inf
  }

  // Raises base to the largest number of a tile; returns the factors by which sums must be multiplied.
  __device__ RowValues update_base(const RowValues& most) {
    RowValues rescale;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float raised = fmaxf(base[row], most[row]);
      rescale[row] = raised == -INFINITY ? 1.f : ptx::exp2(base[row] - raised);
      base[row] = raised;
      l[row] *= rescale[row];
    }
    return rescale;
  }
};

}  // namespace octet::cuda
