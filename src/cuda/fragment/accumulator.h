// Register fragments of one warpgroup: an accumulator of 64 rows as wgmma leaves it (PTX ISA, 9.7.15.5.1.1), and the
// verbs on its rows. Thread t of warp w holds two rows, 16 w + t / 4 and 8 below; of each 8 columns it holds
// 2 (t mod 4) and the next: elements 4 i + {0, 1} belong to its first row, 4 i + {2, 3} to its second.
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

// A fragment that is the left operand of a product: four registers for each 16 columns of 16 bits, or 32 of 8.
template <class T, int Columns>
struct Operand {
  uint32_t x[Columns * sizeof(T) / 8];
};

// Row and first column of this thread in a fragment.
__device__ inline int fragment_row() { return threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4; }
__device__ inline int fragment_column() { return threadIdx.x % 4 * 2; }

// What `from` has no columns for becomes 0.
template <class T, int Columns, int From>
__device__ void convert(const Accumulator<From>& from, Operand<T, Columns>& to) {
#pragma unroll
  for (int i = 0; i < Columns / 4; ++i) to.x[i] = i < From / 4 ? ptx::pack<T>(from.x[2 * i], from.x[2 * i + 1]) : 0;
}

// Which of 16 columns of an accumulator is column i of the operand of bytes that pack_P makes of it: 0 1 8 9, 2
// 3 10 11, 4 5 12 13, 6 7 14 15. What the operand is multiplied with has its columns in that order.
__host__ __device__ constexpr int key_permutation(int i) { return i / 4 * 2 + i % 2 + i / 2 % 2 * 8; }

// A thread's part of an accumulator are pairs of columns, of an operand of bytes fours, so columns trade places within
// each 16: key_permutation.
template <class T, int Columns>
__device__ void pack_P(const Accumulator<Columns>& from, Operand<T, Columns>& to) {
#pragma unroll
  for (int step = 0; step < Columns / 16; ++step)
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float* x = &from.x[8 * step + 2 * row];
      to.x[step / 2 * 4 + step % 2 * 2 + row] = ptx::pack<T>(x[0], x[1], x[4], x[5]);
    }
}

}  // namespace octet::cuda
