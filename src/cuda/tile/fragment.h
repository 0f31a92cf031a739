// Register fragments of one warpgroup: an accumulator of 64 rows as wgmma leaves it (PTX ISA, 9.7.15.5.1.1), and the
// verbs on its rows. Thread t of warp w holds two rows, 16 w + t / 4 and 8 below; of each 8 columns it holds
// 2 (t mod 4) and the next: elements 4 i + {0, 1} belong to its first row, 4 i + {2, 3} to its second.
#pragma once
#include <cstdint>

#include "cuda/ptx/types.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/tile/shared.h"

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

// d (+)= a b^T: rows [row, row + 64) of a, the first rows of b, as many as d has columns. Issued, not awaited.
template <int Columns, class TileA, class TileB>
__device__ void mm_ABt(Accumulator<Columns>& d, const TileA& a, int row, const TileB& b, bool accumulate) {
  static_assert(TileA::kColumns == TileB::kColumns && Columns <= TileB::kRows);
#pragma unroll
  for (int step = 0; step < TileA::kColumns / 16; ++step)
    ptx::Wgmma<typename TileA::Element, Columns>::template ss<0, 0>(d.x, a.along(row, step), b.along(0, step),
                                                                    accumulate || step);
}

// d += a b: a in registers, b's rows are the index of summation. Issued, not awaited.
template <class T, int Columns, class TileB>
__device__ void mma_AB(Accumulator<TileB::kColumns>& d, const Operand<T, Columns>& a, const TileB& b) {
  static_assert(TileB::kRows == Columns);
#pragma unroll
  for (int step = 0; step < Columns / 16; ++step)
    ptx::Wgmma<T, TileB::kColumns>::template rs<1>(d.x, &a.x[4 * step], b.across(step), true);
}

// d += a b: the 64 rows of a, b's rows are the index of summation. Issued, not awaited.
template <class TileA, class TileB>
__device__ void mma_AB(Accumulator<TileB::kColumns>& d, const TileA& a, const TileB& b) {
  static_assert(TileA::kColumns == TileB::kRows && TileA::kRows == kWarpgroupRows);
#pragma unroll
  for (int step = 0; step < TileA::kColumns / 16; ++step)
    ptx::Wgmma<typename TileA::Element, TileB::kColumns>::template ss<0, 1>(d.x, a.along(0, step), b.across(step),
                                                                            true);
}

// d (+)= a b over the rows of both tiles, b's columns from 64 `panel`: a^T's rows are 64 columns of `a`, in its panel
// `a_panel`. Issued, not awaited.
template <int Columns, class TileA, class TileB>
__device__ void mm_AtB(Accumulator<Columns>& d, const TileA& a, int a_panel, const TileB& b, int panel,
                       bool accumulate = false) {
  static_assert(TileA::kRows == TileB::kRows);
#pragma unroll
  for (int step = 0; step < TileA::kRows / 16; ++step)
    ptx::Wgmma<typename TileA::Element, Columns>::template ss<1, 1>(d.x, a.across(step, a_panel), b.across(step, panel),
                                                                    accumulate || step);
}

// d = a b^T of bytes: rows [row, row + 64) of a, all rows of b. Issued, not awaited.
template <class Sum, class TileA, class TileB>
__device__ void mm_bytes(Accumulator<TileB::kRows, Sum>& d, const TileA& a, int row, const TileB& b) {
  static_assert(TileA::kColumns == TileB::kColumns);
#pragma unroll
  for (int step = 0; step < TileA::kColumns / TileA::kDepth; ++step)
    ptx::ByteWgmma<typename TileA::Element, typename TileB::Element, TileB::kRows>::ss(d.x, a.along(row, step),
                                                                                       b.along(0, step), step != 0);
}

// d (+)= a b^T of bytes, a in registers. Issued, not awaited.
template <class Sum, class T, int Columns, class TileB>
__device__ void mm_bytes(Accumulator<TileB::kRows, Sum>& d, const Operand<T, Columns>& a, const TileB& b,
                         bool accumulate) {
  static_assert(TileB::kColumns == Columns);
#pragma unroll
  for (int step = 0; step < Columns / TileB::kDepth; ++step)
    ptx::ByteWgmma<T, typename TileB::Element, TileB::kRows>::rs(d.x, &a.x[4 * step], b.along(0, step),
                                                                 accumulate || step);
}

// A thread's part of an accumulator are pairs of columns, of an operand of bytes fours, so columns trade places within
// each 16: byte_order.
template <class T, int Columns>
__device__ void convert_bytes(const Accumulator<Columns>& from, Operand<T, Columns>& to) {
#pragma unroll
  for (int step = 0; step < Columns / 16; ++step)
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float* x = &from.x[8 * step + 2 * row];
      to.x[step / 2 * 4 + step % 2 * 2 + row] = ptx::pack<T>(x[0], x[1], x[4], x[5]);
    }
}

// Where in 64 rows of a tile this thread's first address for stmatrix lies.
__device__ inline int store_offset() {
  const int lane = threadIdx.x % 32, row = threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
  return row * kPanelRowBytes + (lane / 16 ^ row % kSwizzleRows) * 16;
}

// Writes a fragment into rows [row, row + 64) of a tile: stmatrix, four 8 x 8 matrices at a time (PTX
// ISA, 9.7.14.5.16). Where a loop stores, `offset` may be worked out before.
template <class T, int Columns, class Tile>
__device__ void store(const Operand<T, Columns>& x, const Tile& tile, int row, int offset = store_offset()) {
  static_assert(Tile::kColumns == Columns);
  const uint32_t first = tile.address() + row * kPanelRowBytes + offset;
#pragma unroll
  for (int i = 0; i < Columns / 16; ++i) ptx::stmatrix((first ^ i % 4 * 32) + i / 4 * Tile::kPanelBytes, &x.x[4 * i]);
}

// One number for each row of a thread.
struct RowValues {
  float x[kRowsPerThread];
  __device__ float& operator[](int i) { return x[i]; }
  __device__ float operator[](int i) const { return x[i]; }
};

// Over the four threads that share a row.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// The largest of `start` and this thread's elements of a row.
template <int Columns>
__device__ float row_max(const Accumulator<Columns>& s, int row, float start) {
  float most[2] = {start, s.x[2 * row]};
#pragma unroll
  for (int i = 0; i < Columns / 8; ++i)
#pragma unroll
    for (int c = 0; c < 2; ++c) most[c] = fmaxf(most[c], s.x[4 * i + 2 * row + c]);
  return fmaxf(most[0], most[1]);
}

// Multiplies each row by its number. A vote whether all numbers are 1 costs more than the products.
template <int Columns>
__device__ void scale_rows(Accumulator<Columns>& d, const RowValues& by) {
#pragma unroll
  for (int i = 0; i < Columns / 2; ++i) d.x[i] *= by[i / 2 % 2];
}

}  // namespace octet::cuda
