// Operations on the two rows of an accumulator that a thread holds.
#pragma once
#include "cuda/fragment/accumulator.h"

namespace octet::cuda {

// One number for each row of a thread.
struct RowValues {
  float x[kRowsPerThread];
  __device__ float& operator[](int i) { return x[i]; }
  __device__ float operator[](int i) const { return x[i]; }
};

// Reductions over the four threads that share a row.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Returns the largest of `start` and this thread's elements of a row.
template <int Columns>
__device__ float row_max(const Accumulator<Columns>& s, int row, float start) {
  float most[2] = {start, s.x[2 * row]};
#pragma unroll
  for (int i = 0; i < Columns / 8; ++i)
#pragma unroll
    for (int c = 0; c < 2; ++c) most[c] = fmaxf(most[c], s.x[4 * i + 2 * row + c]);
  return fmaxf(most[0], most[1]);
}

// Multiplies each row by its number. A vote on whether all numbers are 1 costs more than the products.
template <int Columns>
__device__ void scale_rows(Accumulator<Columns>& d, const RowValues& by) {
#pragma unroll
  for (int i = 0; i < Columns / 2; ++i) d.x[i] *= by[i / 2 % 2];
}

}  // namespace octet::cuda
