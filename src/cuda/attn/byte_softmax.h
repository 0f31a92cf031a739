// Online softmax with weights of 8 bits, for the two rows of a thread. x is a logit but for its query's step and the
// scale: exp(scale s) = 2^(unit x).
//
// Weights of 8 bits do not need the largest to be exactly 1, so scaling and subtraction are one fma.
#pragma once
#include "cuda/ptx/types.h"
#include "cuda/tile/fragment.h"

namespace octet::cuda {

// The numbers of this thread's columns 8 i + fragment_column() and the next in an array of shared memory.
__device__ inline float2 of_columns(const float* array, int i) {
  return *reinterpret_cast<const float2*>(array + 8 * i + fragment_column());
}

// x = sum times its key's step; null: 1.
template <class Sum, int Columns>
__device__ void dequantise(const Accumulator<Columns, Sum>& sums, const float* steps, Accumulator<Columns>& x) {
#pragma unroll
  for (int i = 0; i < Columns / 8; ++i) {
    const float2 step = steps ? of_columns(steps, i) : float2{1.f, 1.f};
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      x.x[4 * i + 2 * row] = static_cast<float>(sums.x[4 * i + 2 * row]) * step.x;
      x.x[4 * i + 2 * row + 1] = static_cast<float>(sums.x[4 * i + 2 * row + 1]) * step.y;
    }
  }
}

// Weights on one scale, kTop p.
template <class Precision>
struct ByteSoftmax {
  RowValues unit;
  RowValues m{-INFINITY, -INFINITY};  // of x
  RowValues l{0.f, 0.f};              // of this thread's columns; unused where the product with v sums rounded weights

  // The row's largest logit times log2 e.
  __device__ float top(int row) const { return m[row] * unit[row]; }

  // Turns x into kTop p; returns by what sums over the former maximum must be multiplied.
  template <int Columns>
  __device__ RowValues step(Accumulator<Columns>& x) {
    RowValues shrink;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float most = quad_max(row_max(x, row, m[row]));
      const float base = most == -INFINITY ? 0.f : most;  // a row that has seen no key yet
      const float shift = log2f(Precision::kTop) - base * unit[row];
      shrink[row] = ptx::exp2((m[row] - base) * unit[row]);
      m[row] = most;
      float sum[2] = {l[row] * shrink[row], 0.f};
#pragma unroll
      for (int i = 0; i < Columns / 8; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& p = x.x[4 * i + 2 * row + c];
          p = ptx::exp2(__fmaf_rn(p, unit[row], shift));
          if constexpr (!Precision::kSumRounded) sum[c] += p;
        }
      l[row] = sum[0] + sum[1];
    }
    return shrink;
  }
};

// Weights times the steps t of v, with a scale for each part of a tile: 255 stands for the part's largest p t. What is
// compared and exponentiated are logarithms, log2(p t) = unit x + log2 t, so that neither a maximum of logits is needed
// nor a product with t; l sums p t times 1 / t.
//
// Sums over all parts are in units of 2^base. The step of a part may be any float, so base stays until it is far too
// small.
struct ScaledSoftmax {
  static constexpr float kTop = 255.f;

  RowValues unit;
  RowValues base{-INFINITY, -INFINITY};
  RowValues l{0.f, 0.f};  // of this thread's columns

  __device__ float top(int row) const { return base[row]; }

  // x = log2(p t).
  template <int Columns>
  __device__ void weigh(Accumulator<Columns>& x, const float* v_log) const {
#pragma unroll
    for (int i = 0; i < Columns / 8; ++i) {
      const float2 log = of_columns(v_log, i);
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) {
        float* y = &x.x[4 * i + 2 * row];
        y[0] = __fmaf_rn(y[0], unit[row], log.x), y[1] = __fmaf_rn(y[1], unit[row], log.y);
      }
    }
  }

  // The largest number of each row in columns [first, last).
  template <int Columns>
  __device__ static RowValues largest(const Accumulator<Columns>& x, int first, int last) {
    RowValues most;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      float y[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int i = first / 8; i < last / 8; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) y[c] = fmaxf(y[c], x.x[4 * i + 2 * row + c]);
      most[row] = quad_max(fmaxf(y[0], y[1]));
    }
    return most;
  }

  // Whether a part's largest number is far above base.
  __device__ bool must_rise(const RowValues& most) const {
    constexpr float kReach = 60.f;
    return most[0] > base[0] + kReach || most[1] > base[1] + kReach;  // also above -inf
  }

  // Raises base to a part's largest number; returns by what sums must be multiplied.
  __device__ RowValues raise(const RowValues& most) {
    RowValues shrink;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float raised = fmaxf(base[row], most[row]);
      shrink[row] = raised == -INFINITY ? 1.f : ptx::exp2(base[row] - raised);
      base[row] = raised;
      l[row] *= shrink[row];
    }
    return shrink;
  }

  // Turns logarithms of columns [first, last) into 0 to 255 and adds to l; returns the step of these numbers.
  template <int Columns>
  __device__ RowValues step(Accumulator<Columns>& x, int first, int last, const RowValues& most,
                            const float* v_inverse) {
    RowValues steps, shift, sum{0.f, 0.f};
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const bool any = most[row] != -INFINITY;
      shift[row] = log2f(kTop) - (any ? most[row] : 0.f);
      steps[row] = any ? ptx::exp2(most[row] - base[row]) * (1.f / kTop) : 0.f;
    }
#pragma unroll
    for (int i = first / 8; i < last / 8; ++i) {
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
    return steps;
  }
};

}  // namespace octet::cuda
