// Online softmax with P of 8 bits, for the two rows of a thread. x is a logit but for its query's scale and the
// scale, and where keys have scales by groups but for that of its key: exp(scale s) = 2^(scale_log2 scale x).
//
// P of 8 bits do not need the largest to be exactly 1, so scaling and subtraction are one fma.
#pragma once
#include <type_traits>

#include "cuda/fragment/precision.h"
#include "cuda/fragment/rows.h"
#include "cuda/ptx/types.h"

namespace octet::cuda {

// In the place of a scale_log2 that is too small for a float: 0 times a logit of -inf would be NaN.
constexpr float kMinScaleLog2 = 0x1p-149f;

// The numbers of this thread's columns 8 i + fragment_column() and the next in an array of shared memory.
__device__ inline float2 of_columns(const float* array, int i) {
  return *reinterpret_cast<const float2*>(array + 8 * i + fragment_column());
}

// x = sum. Float sums are x already.
template <class Sum, int Columns>
__device__ void to_floats(const Accumulator<Columns, Sum>& sums, Accumulator<Columns>& x) {
  if constexpr (!std::is_same_v<Sum, float>)
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i) x.x[i] = static_cast<float>(sums.x[i]);
}

// x times the scale of each key.
template <int Columns>
__device__ void scale_columns(Accumulator<Columns>& x, const float* steps) {
#pragma unroll
  for (int i = 0; i < Columns / 8; ++i) {
    const float2 step = of_columns(steps, i);
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) x.x[4 * i + 2 * row] *= step.x, x.x[4 * i + 2 * row + 1] *= step.y;
  }
}

// Steps of this thread's columns in an accumulator: `Count` of them, each for as many columns.
template <int Count>
struct ColumnScales {
  float x[Count];
  template <int Columns>
  __device__ float of(int i) const {  // the scale of its element i
    return x[i / (Columns / 2 / Count)];
  }
};
__device__ inline ColumnScales<1> no_scales() { return {{1.f}}; }

// How many scales of groups (precision.h) a tile of keys meets: four for each block of 64 tokens.
template <int Keys>
constexpr int kGroupScales = (Keys + kGroupBlock - 1) / kGroupBlock* kScaleGroups;

// The scales of this thread's columns in tile `tile` of `Keys` keys, from those of the blocks that it meets, [block,
// group]. A tile of an odd number of half blocks starts in the middle of one where its number is odd.
template <int Keys>
__device__ auto scales_of_groups(const float* steps, int tile) {
  constexpr bool kHalves = Keys % kGroupBlock != 0;
  constexpr int kColumns = kHalves ? kGroupBlock / 2 : kGroupBlock;  // that share a step
  constexpr int kBlocks = kGroupScales<Keys> / kScaleGroups;
  static_assert(Keys % kColumns == 0);
  float of_block[kBlocks];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) of_block[i] = steps[i * kScaleGroups + threadIdx.x % kScaleGroups];
  ColumnScales<Keys / kColumns> columns;
#pragma unroll
  for (int i = 0; i < Keys / kColumns; ++i)
    columns.x[i] = kHalves && tile % 2 ? of_block[(i + 1) / 2] : of_block[kHalves ? i / 2 : i];
  return columns;
}

// P on one scale: p = 2^(scale_log2 scale x + shift), with one product scale_log2 scale for all logits that share it.
// Any shift gives the same result as long as no p leaves its format, so a row keeps the shift of its first tile, at
// which its largest p was kStart, until a p reaches the format's largest number.
template <class Precision>
struct SharedScaleSoftmax {
  RowValues scale_log2;
  RowValues shift{INFINITY, INFINITY};  // of a row that has seen no key: no p fits
  RowValues l{0.f, 0.f};                // of this thread's columns; unused where the product with v sums rounded P

  // sum of exp(logit) = 2^exponent l.
  __device__ float exponent(int row) const { return -shift[row]; }

  // Turns x into p over the shift that the rows have. Returns whether quantized values hold them in all rows of the
  // warp, whose threads call it together.
  template <int Columns, int Steps>
  __device__ bool exp_stale_max(Accumulator<Columns>& x, const ColumnScales<Steps>& steps, RowValues& sum) const {
    sum = exponentials(x, steps);
    int most = 0;  // numbers that are not negative order as their bits do, and NaN lies above
#pragma unroll
    for (int i = 0; i < Columns / 2; i += 2) most = max(max(__float_as_int(x.x[i]), __float_as_int(x.x[i + 1])), most);
    return !__any_sync(~0u, most > __float_as_int(448.f));
  }

  // Turns x into p over a new shift; returns by what sums over the former one must be multiplied. x may be -inf, so a
  // group of zeros counts as one with scale 1.
  template <int Columns, int Steps>
  __device__ RowValues exp_update_max(Accumulator<Columns>& x, ColumnScales<Steps> steps, RowValues& sum) {
#pragma unroll
    for (float& step : steps.x) step = step == 0.f ? 1.f : step;
    RowValues largest{-INFINITY, -INFINITY}, rescale;
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i)
      largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], x.x[i] * steps.template of<Columns>(i));
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float most = quad_max(largest[row]);
      const float former = shift[row];
      if (most != -INFINITY) shift[row] = fminf(former, log2f(Precision::kStart) - most * scale_log2[row]);
      rescale[row] = former == INFINITY ? 1.f : ptx::exp2(shift[row] - former);
      l[row] *= rescale[row];
    }
    // A row that still has seen no key has P 2^-inf.
    const RowValues shifts = shift;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row)
      if (shift[row] == INFINITY) shift[row] = 0.f;
    sum = exponentials(x, steps);
    shift = shifts;
    return rescale;
  }

 private:
  // p from x in place; returns its sums.
  template <int Columns, int Steps>
  __device__ RowValues exponentials(Accumulator<Columns>& x, const ColumnScales<Steps>& steps) const {
    RowValues sum{0.f, 0.f};
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i) {
      const int row = i / 2 % 2;
      x.x[i] = ptx::exp2(__fmaf_rn(x.x[i], scale_log2[row] * steps.template of<Columns>(i), shift[row]));
      if constexpr (!Precision::kSumRounded) sum[row] += x.x[i];
    }
    return sum;
  }
};

// P times the steps t of v, with a scale for each tile: 255 stands for the tile's largest p t. What is
// compared and exponentiated are logarithms, log2(p t) = scale_log2 x + log2 t, so that neither a maximum of logits is
// needed nor a product with t; l sums p t times 1 / t.
//
// Sums over all tiles are in units of 2^base. The step of a tile may be any float, so base stays until it is far too
// small.
struct TileScaleSoftmax {
  static constexpr float kTop = 255.f;

  RowValues scale_log2;
  RowValues base{-INFINITY, -INFINITY};
  RowValues l{0.f, 0.f};  // of this thread's columns

  // sum of exp(logit) = 2^exponent l.
  __device__ float exponent(int row) const { return base[row]; }

  // x = log2(p t).
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

  // The largest number of each row; o is scaled to a new base where one is needed. All threads of a warp call it
  // together.
  template <int Columns, int OColumns>
  __device__ RowValues largest(const Accumulator<Columns>& x, Accumulator<OColumns>& o) {
    RowValues most;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) most[row] = quad_max(row_max(x, row, -INFINITY));
    if (__any_sync(~0u, must_update_base(most))) scale_rows(o, update_base(most));
    return most;
  }

  // Quantized values p from logarithms; returns their step. `zero` comes from what the exponentials are to wait for.
  template <int Columns>
  __device__ RowValues quantize_p(Accumulator<Columns>& x, const RowValues& most, const float* v_inverse, float zero,
                                  Operand<U8, Columns>& p) {
    RowValues steps, shift, sum{0.f, 0.f};
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const bool any = most[row] != -INFINITY;
      shift[row] = log2f(kTop) - (any ? most[row] : 0.f) + zero;
      steps[row] = any ? ptx::exp2(most[row] - base[row]) * (1.f / kTop) : 0.f;
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
    for (int row = 0; row < kRowsPerThread; ++row) l[row] = __fmaf_rn(sum[row], steps[row], l[row]);
    pack_P(x, p);
    return steps;
  }

 private:
  // Whether a tile's largest number is far above base.
  __device__ bool must_update_base(const RowValues& most) const {
    constexpr float kReach = 60.f;
    return most[0] > base[0] + kReach || most[1] > base[1] + kReach;  // also above -inf
  }

  // Raises base to a tile's largest number; returns by what sums must be multiplied.
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
