// Register fragments of one warpgroup: an accumulator of 64 rows in the layout of wgmma (PTX ISA, 9.7.15.5.1.1). Thread
// t of warp w holds two rows, 16 w + t / 4 and the one 8 below; of each 8 columns it holds 2 (t mod 4) and the next.
// Elements 4 i + {0, 1} belong to its first row, 4 i + {2, 3} to its second.
#pragma once
#include <cstdint>

#include "cuda/ptx/types.h"

namespace octet::cuda {

constexpr int kWarpgroup = 128;     // threads
constexpr int kWarpgroupRows = 64;  // rows of an accumulator
constexpr int kRowsPerThread = 2;

template <int Columns, class T = float>
struct Accumulator {
  static constexpr int kColumns = Columns;
  T x[Columns / 2];

  __device__ void zero() {
#pragma unroll
    for (T& element : x) element = 0;
  }
  __device__ void scale(float by) {
#pragma unroll
    for (T& element : x) element *= by;
  }
};

// The left operand of a product in registers: four registers for each 16 columns of 16 bits, or for each 32 columns of
// 8 bits.
template <class T, int Columns>
struct Operand {
  uint32_t x[Columns * sizeof(T) / 8];
};

// The warpgroup of this thread. The shuffle tells the compiler that all threads of a warp take the same branch.
__device__ inline int warpgroup_index() { return __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0); }

// The row and the first column of this thread in a fragment.
__device__ inline int fragment_row() { return threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4; }
__device__ inline int fragment_column() { return threadIdx.x % 4 * 2; }

// Converts to the operand type. Columns beyond those of `from` become 0.
template <class T, int Columns, int From>
__device__ void convert(const Accumulator<From>& from, Operand<T, Columns>& to) {
#pragma unroll
  for (int i = 0; i < Columns / 4; ++i) to.x[i] = i < From / 4 ? ptx::pack<T>(from.x[2 * i], from.x[2 * i + 1]) : 0;
}

// Returns which of 16 accumulator columns becomes column i of the 8-bit operand that pack_P makes: 0 1 8 9, 2 3 10 11,
// 4 5 12 13, 6 7 14 15. The other factor of the product stores its keys in this order.
__host__ __device__ constexpr int key_permutation(int i) { return i / 4 * 2 + i % 2 + i / 2 % 2 * 8; }

// Converts an accumulator to an 8-bit operand. A thread holds pairs of columns of an accumulator, but groups of four of
// an 8-bit operand, so columns are permuted within each 16: see key_permutation.
template <class T, int Columns>
__device__ void pack_P(const Accumulator<Columns>& from, Operand<T, Columns>& to) {
#pragma unroll
  for (int k_step = 0; k_step < Columns / 16; ++k_step)
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float* x = &from.x[8 * k_step + 2 * row];
      to.x[k_step / 2 * 4 + k_step % 2 * 2 + row] = ptx::pack<T>(x[0], x[1], x[4], x[5]);
    }
}

}  // namespace octet::cuda
