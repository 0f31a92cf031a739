// Matrix products of one warpgroup (wgmma) on tiles in shared memory and fragments in registers, and fragments on their
// way to shared memory. Products are issued and not awaited: see wgmma_commit and wgmma_wait.
#pragma once
#include "cuda/fragment/accumulator.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/smem.h"

namespace octet::cuda {

// d (+)= a b^T: rows [row, row + 64) of a, the first rows of b, as many as d has columns.
template <int Columns, class TileA, class TileB>
__device__ void mma_ABt(Accumulator<Columns>& d, const TileA& a, int row, const TileB& b, bool accumulate) {
  static_assert(TileA::kColumns == TileB::kColumns && Columns <= TileB::kRows);
#pragma unroll
  for (int step = 0; step < TileA::kColumns / 16; ++step)
    ptx::Wgmma<typename TileA::Element, Columns>::template ss<0, 0>(d.x, a.along(row, step), b.along(0, step),
                                                                    accumulate || step);
}

// d += a b: a in registers, b's rows are the index of summation.
template <class T, int Columns, class TileB>
__device__ void mma_AB(Accumulator<TileB::kColumns>& d, const Operand<T, Columns>& a, const TileB& b) {
  static_assert(TileB::kRows == Columns);
#pragma unroll
  for (int step = 0; step < Columns / 16; ++step)
    ptx::Wgmma<T, TileB::kColumns>::template rs<1>(d.x, &a.x[4 * step], b.across(step), true);
}

// d += a b: the 64 rows of a, b's rows are the index of summation.
template <class TileA, class TileB>
__device__ void mma_AB(Accumulator<TileB::kColumns>& d, const TileA& a, const TileB& b) {
  static_assert(TileA::kColumns == TileB::kRows && TileA::kRows == kWarpgroupRows);
#pragma unroll
  for (int step = 0; step < TileA::kColumns / 16; ++step)
    ptx::Wgmma<typename TileA::Element, TileB::kColumns>::template ss<0, 1>(d.x, a.along(0, step), b.across(step),
                                                                            true);
}

// d (+)= a b over the rows of both tiles, b's columns from 64 `panel`: a^T's rows are 64 columns of `a`, in its panel
// `a_panel`.
template <int Columns, class TileA, class TileB>
__device__ void mma_AtB(Accumulator<Columns>& d, const TileA& a, int a_panel, const TileB& b, int panel,
                        bool accumulate = false) {
  static_assert(TileA::kRows == TileB::kRows);
#pragma unroll
  for (int step = 0; step < TileA::kRows / 16; ++step)
    ptx::Wgmma<typename TileA::Element, Columns>::template ss<1, 1>(d.x, a.across(step, a_panel), b.across(step, panel),
                                                                    accumulate || step);
}

// d = a b^T of bytes: rows [row, row + 64) of a, all rows of b.
template <class Sum, class TileA, class TileB>
__device__ void mma_ABt_8bit(Accumulator<TileB::kRows, Sum>& d, const TileA& a, int row, const TileB& b) {
  static_assert(TileA::kColumns == TileB::kColumns);
#pragma unroll
  for (int step = 0; step < TileA::kColumns / TileA::kDepth; ++step)
    ptx::Wgmma8Bit<typename TileA::Element, typename TileB::Element, TileB::kRows>::ss(d.x, a.along(row, step),
                                                                                       b.along(0, step), step != 0);
}

// d (+)= a b^T of bytes, a in registers.
template <class Sum, class T, int Columns, class TileB>
__device__ void mma_ABt_8bit(Accumulator<TileB::kRows, Sum>& d, const Operand<T, Columns>& a, const TileB& b,
                             bool accumulate) {
  static_assert(TileB::kColumns == Columns);
#pragma unroll
  for (int step = 0; step < Columns / TileB::kDepth; ++step)
    ptx::Wgmma8Bit<T, typename TileB::Element, TileB::kRows>::rs(d.x, &a.x[4 * step], b.along(0, step),
                                                                 accumulate || step);
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

}  // namespace octet::cuda
