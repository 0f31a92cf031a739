// Tiles of bytes whose rows are the index of summation, as right operands of products. ldmatrix transposes 16 bits at a
// time: a register gets two channels of two keys, and a thread, of 16 channels, 4 j and 4 j + 2 in the first 8 columns
// of an accumulator and those after them in the others.
#pragma once
#include "cuda/sm80/mma.h"

namespace octet::cuda::sm80 {

// d += a b, with e4m3 in both: a in registers, in the order of key_permutation, and all rows of b. Columns [32 n, 32 n
// + 32) of d, in the order of transposed bytes, are those of b. Their products are summed from zero, and the sums added
// to d in float32. `lane` is where this lane's rows of b lie (lane_down()).
template <int M, int Depth, int Columns, class TileB>
__device__ void add_AB_of_bytes(uint32_t lane, Accumulator<Columns> (&d)[M], const Operand<E4m3, Depth> (&a)[M],
                                const TileB& b, int n) {
  constexpr int kStep = 32, kHalf = 16;  // rows of b, and columns
  static_assert(Depth % kStep == 0 && Depth == TileB::kRows && Columns == TileB::kColumns);
  uint32_t x[Depth / kHalf][4];
#pragma unroll
  for (int i = 0; i < Depth / kHalf; ++i) ptx::ldmatrix_trans(x[i], b.step(lane, i, n));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Accumulator<kHalf> sums[M];
#pragma unroll
    for (auto& each : sums) each.zero();
#pragma unroll
    for (int k_step = 0; k_step < Depth / kStep; ++k_step)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        uint32_t right[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
          right[i] = __byte_perm(x[2 * k_step + i][2 * half], x[2 * k_step + i][2 * half + 1], odd ? 0x7531 : 0x6420);
#pragma unroll
        for (int m = 0; m < M; ++m) ptx::mma_m16n8k32_e4m3(&sums[m].x[4 * odd], &a[m].x[4 * k_step], right);
      }
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int i = 0; i < kHalf / 2; ++i) d[m].x[16 * n + 8 * half + i] += sums[m].x[i];
  }
}

// Puts channels in the order of transposed bytes into that of an accumulator. A quad has 16 of a row, four neighbours
// in each thread; thread j gets channels 2 j, 2 j + 8 and those after them.
template <int M, int Columns>
__device__ void order_channels_of_bytes(Accumulator<Columns> (&o)[M]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, from = lane / 4 * 4 + lane % 4 / 2;
  const bool second = lane % 2;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int i = 0; i < Columns / 2; i += 8)
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) {
        float* const even = &o[m].x[i + 2 * row];
        float* const odd = even + 4;
        float ordered[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float* const x = n % 2 ? odd : even;
          const float low = __shfl_sync(~0u, x[0], from + n / 2 * 2), high = __shfl_sync(~0u, x[1], from + n / 2 * 2);
          ordered[n] = second ? high : low;
        }
        even[0] = ordered[0], even[1] = ordered[1], odd[0] = ordered[2], odd[1] = ordered[3];
      }
}

}  // namespace octet::cuda::sm80
