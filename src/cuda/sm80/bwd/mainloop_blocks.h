// The products of dq, dk and dv where tiles of P and ds are integers with a scale of their own (operands_blocks.h).
#pragma once
#include "cuda/sm80/bwd/backward.h"

namespace octet::cuda::sm80 {

// d += scale a^T b, as mma_AtB, of integers whose products sum to at most 2^24. The sums of 32 columns at a time are
// apart from d.
template <int M, int Columns, class TileA, class TileB>
__device__ void add_AtB(Accumulator<Columns> (&d)[M], const TileA& a, int a_block, const TileB& b, int b_block,
                        float scale) {
  constexpr int kColumns = 32;
#pragma unroll
  for (int first = 0; first < Columns; first += kColumns) {
    Accumulator<kColumns> sums[M];
    for (auto& block : sums) block.zero();
    mma_AtB(sums, a, a_block, b, b_block + first / 16, [](int) {});
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        float& x = d[m].x[first / 2 + i];
        x = __fmaf_rn(sums[m].x[i], scale, x);
      }
  }
}

// dk += ds^T q, dv += p^T do and dq += ds k of iteration n. q, do and its integers have one stage, and the two of do
// one place: as soon as all have read one, the next takes it.
template <class Kind>
__device__ void Backward<Kind>::multiply_tiles(TileDk& dk, TileDk& dv, int n, const TileScales& by) const {
  const bool more = n + 1 < shared.iterations;
  const auto& scales = shared.operands;
  // opaque() stops the compiler from keeping addresses in registers throughout the loop.
  const int warp = ptx::opaque(this->warp);
  const TileP p{shared.p[0]}, ds{shared.ds[0]};
  add_AtB(dk, ds, PartK::row_block(warp), TileQ{shared.q[0]}, PartK::column_block(warp),
          by.ds * (scales.q_scale * scales.q_unit));
  const float dv_scale = by.p * (scales.do_scale * scales.do_unit);
  ptx::cp_async_wait<kPlain ? 0 : 1>();
  __syncthreads();  // the integers of do have arrived, and q has been read
  const Step& next = shared.steps[(n + 1) % kSteps];
  if (more) load_q(next, 0);
  ptx::cp_async_commit();
  add_AtB(dv, p, PartK::row_block(warp), TileQ{shared.do_[0]}, PartK::column_block(warp), dv_scale);
  __syncthreads();  // they have been read
  if (more) load_do(next, 0);
  ptx::cp_async_commit();
  TileDq dq;
  for (auto& block : dq) block.zero();
  mma_AB<kKeys>(dq, ds, PartDq::row_block(warp), TileK{shared.k}, PartDq::column_block(warp));
  Operands::finish_dq(*this, dq, by.ds);
  add(dq, shared.steps[n % kSteps], 0);
}

}  // namespace octet::cuda::sm80
