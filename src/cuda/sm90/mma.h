// Matrix products of one warpgroup (wgmma) on tiles in shared memory and fragments in registers, and stores of
// fragments to shared memory. Products are issued without waiting for them: see wgmma_commit and wgmma_wait.
#pragma once
#include "cuda/fragment/accumulator.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/smem.h"

namespace octet::cuda {

// d (+)= a b^T, with rows [row, row + 64) of a and as many first rows of b as d has columns.
template <int Columns, class TileA, class TileB>
__device__ void mma_ABt(Accumulator<Columns>& d, const TileA& a, int row, const TileB& b, bool accumulate) {
  static_assert(TileA::kColumns == TileB::kColumns && Columns <= TileB::kRows);
#pragma unroll
  for (int k_step = 0; k_step < TileA::kColumns / 16; ++k_step)
    ptx::Wgmma<typename TileA::Element, Columns>::template ss<0, 0>(d.x, a.along(row, k_step), b.along(0, k_step),
                                                                    accumulate || k_step);
}

// d += a b, with a in registers; the rows of b are the index of summation.
template <class T, int Columns, class TileB>
__device__ void mma_AB(Accumulator<TileB::kColumns>& d, const Operand<T, Columns>& a, const TileB& b) {
  static_assert(TileB::kRows == Columns);
#pragma unroll
  for (int k_step = 0; k_step < Columns / 16; ++k_step)
    ptx::Wgmma<T, TileB::kColumns>::template rs<1>(d.x, &a.x[4 * k_step], b.across(k_step), true);
}

// d += a b, with the 64 rows of a; the rows of b are the index of summation.
template <class TileA, class TileB>
__device__ void mma_AB(Accumulator<TileB::kColumns>& d, const TileA& a, const TileB& b) {
  static_assert(TileA::kColumns == TileB::kRows && TileA::kRows == kWarpgroupRows);
#pragma unroll
  for (int k_step = 0; k_step < TileA::kColumns / 16; ++k_step)
    ptx::Wgmma<typename TileA::Element, TileB::kColumns>::template ss<0, 1>(d.x, a.along(0, k_step), b.across(k_step),
                                                                            true);
}

// d (+)= a^T b, summed over the rows of both tiles: the rows of a^T are the 64 columns of panel `a_panel` of a, the
// columns of b start at 64 `panel`.
template <int Columns, class TileA, class TileB>
__device__ void mma_AtB(Accumulator<Columns>& d, const TileA& a, int a_panel, const TileB& b, int panel,
                        bool accumulate = false) {
  static_assert(TileA::kRows == TileB::kRows);
#pragma unroll
  for (int k_step = 0; k_step < TileA::kRows / 16; ++k_step)
    ptx::Wgmma<typename TileA::Element, Columns>::template ss<1, 1>(d.x, a.across(k_step, a_panel),
                                                                    b.across(k_step, panel), accumulate || k_step);
}

// d = a b^T of 8-bit tiles, with rows [row, row + 64) of a and all rows of b.
template <class Sum, class TileA, class TileB>
__device__ void mma_ABt_8bit(Accumulator<TileB::kRows, Sum>& d, const TileA& a, int row, const TileB& b) {
  static_assert(TileA::kColumns == TileB::kColumns);
#pragma unroll
  for (int k_step = 0; k_step < TileA::kColumns / TileA::kDepth; ++k_step)
    ptx::Wgmma8Bit<typename TileA::Element, typename TileB::Element, TileB::kRows>::ss(d.x, a.along(row, k_step),
                                                                                       b.along(0, k_step), k_step != 0);
}

// d (+)= a b^T of 8-bit operands, with a in registers.
template <class Sum, class T, int Columns, class TileB>
__device__ void mma_ABt_8bit(Accumulator<TileB::kRows, Sum>& d, const Operand<T, Columns>& a, const TileB& b,
                             bool accumulate) {
  static_assert(TileB::kColumns == Columns);
#pragma unroll
  for (int k_step = 0; k_step < Columns / TileB::kDepth; ++k_step)
    ptx::Wgmma8Bit<T, typename TileB::Element, TileB::kRows>::rs(d.x, &a.x[4 * k_step], b.along(0, k_step),
                                                                 accumulate || k_step);
}

// Returns the offset of this thread's first address for stmatrix within 64 rows of a tile.
__device__ inline int store_offset(unsigned thread = threadIdx.x) {
  const int lane = thread % 32, row = thread % kWarpgroup / 32 * 16 + lane % 16;
  return row * kPanelRowBytes + (lane / 16 ^ row % kSwizzleRows) * 16;
}

// Writes a fragment into rows [row, row + 64) of a tile: stmatrix, four 8 x 8 matrices at a time (PTX ISA,
// 9.7.14.5.16). A loop may compute `offset` once, before it.
template <class T, int Columns, class Tile>
__device__ void store(const Operand<T, Columns>& x, const Tile& tile, int row, int offset = store_offset()) {
  static_assert(Tile::kColumns == Columns);
  const uint32_t first = tile.address() + row * kPanelRowBytes + offset;
#pragma unroll
  for (int i = 0; i < Columns / 16; ++i) ptx::stmatrix((first ^ i % 4 * 32) + i / 4 * Tile::kPanelBytes, &x.x[4 * i]);
}

}  // namespace octet::cuda
