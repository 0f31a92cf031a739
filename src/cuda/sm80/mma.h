// Matrix products of one warp (mma.sync) on tiles in shared memory and fragments in registers. A warp has 16 rows of
// an accumulator, or `M` times 16 rows, which share the loads of the right operand.
#pragma once
#include <type_traits>

#include "cuda/fragment/accumulator.h"
#include "cuda/ptx/mma_sync.h"
#include "cuda/sm80/smem.h"

namespace octet::cuda::sm80 {

// Loads rows [16 row_block, 16 row_block + 16) of a tile as a left operand, from step `first` of their columns on, a
// multiple of four.
template <class T, int Columns, class Tile>
__device__ void load_rows(Operand<T, Columns>& a, const Tile& tile, int row_block, int first = 0) {
  static_assert(Columns <= Tile::kColumns);
  const uint32_t lane = Tile::move(tile.lane_down(), row_block, first);
#pragma unroll
  for (int k_step = 0; k_step < Columns / kStepColumns<T>; ++k_step)
    ptx::ldmatrix(reinterpret_cast<uint32_t(&)[4]>(a.x[4 * k_step]), tile.step(lane, 0, k_step));
}

// Loads columns [16 column_block, 16 column_block + 16) of a tile, transposed, as a left operand: the rows of the tile
// are the index of summation.
template <class T, int Rows, class Tile>
__device__ void load_columns(Operand<T, Rows>& a, const Tile& tile, int column_block) {
  static_assert(Rows <= Tile::kRows);
  const uint32_t lane = tile.lane_right();
#pragma unroll
  for (int k_step = 0; k_step < Rows / 16; ++k_step)
    ptx::ldmatrix_trans(reinterpret_cast<uint32_t(&)[4]>(a.x[4 * k_step]), tile.step(lane, k_step, column_block));
}

// Adds the products of one step of the index of summation to d, of 16 numbers of 16 bits or 32 of 8. left(m) returns
// the m-th 16 rows of the left operand, right(n) the address from which `load` has the n-th 16 columns of the right
// one.
//
// Integer sums may begin at a number, `begin`, unless that is 0: then d has not to be set before the first step.
template <class A, class B, auto load, int M, int Columns, class Sum, class Left, class Right>
__device__ void mma_step(Accumulator<Columns, Sum> (&d)[M], const Left& left, const Right& right, int begin = 0) {
#pragma unroll
  for (int n = 0; n < Columns / 16; ++n) {
    uint32_t x[4];
    load(x, right(n));
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Sum* const sums = &d[m].x[8 * n + 4 * half];
        if constexpr (sizeof(A) == 2)
          ptx::mma_m16n8k16<A>(sums, left(m), &x[2 * half]);
        else if constexpr (std::is_same_v<A, E4m3>)
          ptx::mma_m16n8k32_e4m3(sums, left(m), &x[2 * half]);
        else if (begin)
          ptx::mma_m16n8k32<A, B>(sums, left(m), &x[2 * half], begin);
        else
          ptx::mma_m16n8k32<A, B>(sums, left(m), &x[2 * half]);
      }
  }
}

// d += a b^T, with a in registers and as many rows of b as d has columns, from row 16 block of b on. `lane` is where
// this lane's rows of b lie (lane_right()).
template <int M, class T, int Depth, int Columns, class Sum, class TileB>
__device__ void mma_ABt_at(uint32_t lane, Accumulator<Columns, Sum> (&d)[M], const Operand<T, Depth> (&a)[M],
                           const TileB& b, int begin = 0, int block = 0) {
  static_assert(Depth <= TileB::kColumns && Columns <= TileB::kRows);
#pragma unroll
  for (int k_step = 0; k_step < Depth / kStepColumns<T>; ++k_step) {
    const auto left = [&](int m) { return &a[m].x[4 * k_step]; };
    const auto right = [&](int n) { return b.step(lane, block + n, k_step); };
    mma_step<T, typename TileB::Element, ptx::ldmatrix>(d, left, right, k_step ? 0 : begin);
  }
}

// The same from row 16 b_block of b and step `first` of its columns on, a multiple of four.
template <int M, class T, int Depth, int Columns, class Sum, class TileB>
__device__ void mma_ABt(Accumulator<Columns, Sum> (&d)[M], const Operand<T, Depth> (&a)[M], const TileB& b,
                        int b_block = 0, int begin = 0, int first = 0) {
  mma_ABt_at(TileB::move(b.lane_right(), b_block, first), d, a, b, begin);
}

// d += a b^T, with rows of the tile a, and as many rows of b as d has columns, from row 16 block of b on. `lane_a`
// and `lane_b` are where this lane's rows of both lie (lane_down() and lane_right()). The index of summation are
// `Depth` columns of both, all if it is 0.
template <int Depth = 0, int M, int Columns, class Sum, class TileA, class TileB>
__device__ void mma_ABt_at(uint32_t lane_a, uint32_t lane_b, Accumulator<Columns, Sum> (&d)[M], const TileA& a,
                           const TileB& b, int begin = 0, int block = 0) {
  static_assert(TileA::kColumns == TileB::kColumns && Columns <= TileB::kRows && Depth <= TileA::kColumns);
  constexpr int kDepth = Depth ? Depth : TileA::kColumns;
#pragma unroll
  for (int k_step = 0; k_step < kDepth / kStepColumns<typename TileA::Element>; ++k_step) {
    uint32_t rows[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) ptx::ldmatrix(rows[m], a.step(lane_a, m, k_step));
    const auto left = [&](int m) { return rows[m]; };
    const auto right = [&](int n) { return b.step(lane_b, block + n, k_step); };
    mma_step<typename TileA::Element, typename TileB::Element, ptx::ldmatrix>(d, left, right, k_step ? 0 : begin);
  }
}

// The same with rows [16 row_block, 16 (row_block + M)) of a, from row 16 b_block of b on, and from step `first` of
// their columns on, a multiple of four.
template <int Depth = 0, int M, int Columns, class Sum, class TileA, class TileB>
__device__ void mma_ABt(Accumulator<Columns, Sum> (&d)[M], const TileA& a, int row_block, const TileB& b,
                        int b_block = 0, int begin = 0, int first = 0) {
  mma_ABt_at<Depth>(TileA::move(a.lane_down(), row_block, first), TileB::move(b.lane_right(), b_block, first), d, a, b,
                    begin);
}

// d += a b, with a in registers; the rows of b from 16 block on are the index of summation. `lane` is where this lane's
// rows of b lie (lane_down()).
template <int M, class T, int Depth, int Columns, class TileB>
__device__ void mma_AB_at(uint32_t lane, Accumulator<Columns> (&d)[M], const Operand<T, Depth> (&a)[M], const TileB& b,
                          int block = 0) {
  static_assert(Depth <= TileB::kRows && Columns <= TileB::kColumns);
#pragma unroll
  for (int k_step = 0; k_step < Depth / 16; ++k_step) {
    const auto left = [&](int m) { return &a[m].x[4 * k_step]; };
    const auto right = [&](int n) { return b.step(lane, block + k_step, n); };
    mma_step<T, T, ptx::ldmatrix_trans>(d, left, right);
  }
}

// The same from row 16 b_row_block of b on. The columns of d are those of b from 16 b_block on, which is a multiple of
// as many blocks as d has.
template <int M, class T, int Depth, int Columns, class TileB>
__device__ void mma_AB(Accumulator<Columns> (&d)[M], const Operand<T, Depth> (&a)[M], const TileB& b, int b_block = 0,
                       int b_row_block = 0) {
  mma_AB_at(TileB::move(b.lane_down(), b_row_block, b_block), d, a, b);
}

// Sums of 16 rows in f16, two columns to a register: those of an accumulator, of which it has half the registers.
template <int Columns>
struct F16Sums {
  uint32_t x[Columns / 4];

  __device__ void add_to(float* accumulator) const {
#pragma unroll
    for (int i = 0; i < Columns / 4; ++i) {
      const float2 sums = ptx::unpack<F16>(x[i]);
      accumulator[2 * i] += sums.x, accumulator[2 * i + 1] += sums.y;
    }
  }
};

// d = a b, summed in f16, which is rounded after each 16 rows of b. The columns of d are those of b from 16 b_block on.
// `lane` is where this lane's rows of b lie (lane_down()).
template <int M, int Depth, int Columns, class TileB>
__device__ void mma_AB_at(uint32_t lane, F16Sums<Columns> (&d)[M], const Operand<F16, Depth> (&a)[M], const TileB& b,
                          int b_block) {
  static_assert(Depth <= TileB::kRows && Columns <= TileB::kColumns);
#pragma unroll
  for (int k_step = 0; k_step < Depth / 16; ++k_step)
#pragma unroll
    for (int n = 0; n < Columns / 16; ++n) {
      uint32_t right[4];
      ptx::ldmatrix_trans(right, b.step(lane, k_step, b_block + n));
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t* const sums = &d[m].x[4 * n + 2 * half];
          if (k_step == 0)
            ptx::mma_m16n8k16_f16_from_zero(sums, &a[m].x[4 * k_step], &right[2 * half]);
          else
            ptx::mma_m16n8k16_f16(sums, &a[m].x[4 * k_step], &right[2 * half]);
        }
    }
}

// d += a b, with rows [16 row_block, 16 (row_block + M)) of the tile a, and as many columns of b as d has, from column
// 16 b_block on. b_block is a multiple of as many. The index of summation are `Depth` columns of a and rows of b, from
// 16 first on, a multiple of as many. `between` is called with the number of each 16 of them, after their products.
template <int Depth, int M, int Columns, class TileA, class TileB, class Between>
__device__ void mma_AB(Accumulator<Columns> (&d)[M], const TileA& a, int row_block, const TileB& b, int b_block,
                       int first, const Between& between) {
  static_assert(Depth <= TileA::kColumns && Depth <= TileB::kRows && Columns <= TileB::kColumns);
  const uint32_t lane_a = TileA::move(a.lane_down(), row_block, first),
                 lane_b = TileB::move(b.lane_down(), first, b_block);
#pragma unroll
  for (int k_step = 0; k_step < Depth / 16; ++k_step) {
    uint32_t rows[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) ptx::ldmatrix(rows[m], a.step(lane_a, m, k_step));
    const auto left = [&](int m) { return rows[m]; };
    const auto right = [&](int n) { return b.step(lane_b, k_step, n); };
    mma_step<typename TileA::Element, typename TileB::Element, ptx::ldmatrix_trans>(d, left, right);
    between(k_step);
  }
}
template <int Depth, int M, int Columns, class TileA, class TileB>
__device__ void mma_AB(Accumulator<Columns> (&d)[M], const TileA& a, int row_block, const TileB& b, int b_block) {
  mma_AB<Depth>(d, a, row_block, b, b_block, 0, [](int) {});
}

// d += a^T b, summed over the rows of both tiles: the rows of d are columns [16 a_block, 16 (a_block + M)) of a, its
// columns those of b from 16 b_block on. a_block is a multiple of M, b_block of as many blocks as d has. `between` is
// called with the number of each 16 rows, after their products.
template <int M, int Columns, class TileA, class TileB, class Between>
__device__ void mma_AtB(Accumulator<Columns> (&d)[M], const TileA& a, int a_block, const TileB& b, int b_block,
                        const Between& between) {
  static_assert(TileA::kRows == TileB::kRows && Columns <= TileB::kColumns);
  const uint32_t lane_a = TileA::move(a.lane_right(), 0, a_block), lane_b = TileB::move(b.lane_down(), 0, b_block);
#pragma unroll
  for (int k_step = 0; k_step < TileA::kRows / 16; ++k_step) {
    uint32_t rows[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) ptx::ldmatrix_trans(rows[m], a.step(lane_a, k_step, m));
    const auto left = [&](int m) { return rows[m]; };
    const auto right = [&](int n) { return b.step(lane_b, k_step, n); };
    mma_step<typename TileA::Element, typename TileB::Element, ptx::ldmatrix_trans>(d, left, right);
    between(k_step);
  }
}

}  // namespace octet::cuda::sm80
