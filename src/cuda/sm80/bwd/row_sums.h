// The sums of the rows of p and ds that bias correction gproj needs before the mainloop, and its products in the
// mainloop. sm80/bwd/projection.h has the formulas.
//
// A thread block sums the rows of one tile of queries, over the keys that these see, for each head of a group. p and ds
// are computed and rounded by the functions of the mainloop, with its tiles. Nothing overlaps: this bias correction is
// here to be compared with, not to be fast.
#pragma once
#include "cuda/bwd/exponents.h"
#include "cuda/fragment/rows.h"
#include "cuda/sm80/bwd/mainloop.h"

namespace octet::cuda::sm80 {

template <class T>
__device__ float rounded(float x) {
  return ptx::unpack<T>(ptx::pack<T>(x, 0.f)).x;
}

template <class T, int Dim, BackwardKind kind>
__device__ void Backward<T, Dim, kind>::sweep(unsigned number) {
  if (threadIdx.x == 0) {
    KeyBlockInfo& block = shared.key_block;
    const int of_head = a.q_blocks.count * kQueryParts, head = static_cast<int>(number) / of_head,
              part = static_cast<int>(number) % of_head;
    block.batch = head / a.kv_heads, block.kv_head = head % a.kv_heads;
    block.q = a.q_blocks.sequence_of(part / kQueryParts);
    if (block.q.index >= 0)
      block.k = a.k_blocks.cu_seqlens ? a.k_blocks.sequence(block.q.index) : a.k_blocks.sequence_of(0);
    const int tile = part - block.q.first_block * kQueryParts;
    block.tiles = {tile, tile + 1, tile};
    block.part = -1;
  }
  __syncthreads();
  if (w.q.index < 0 || w.tiles.first * kQueries >= w.q.tokens) return;
  do {
    next_part();
    MBlock at = first_tile();
    for (int n = 0; n < shared.iterations; ++n) {
      sum_rows(next_step(at, n));
      __syncthreads();
    }
  } while (w.part + 1 < e.parts);
}

// Sums the rows of one head.
template <class T, int Dim, BackwardKind kind>
__device__ void Backward<T, Dim, kind>::sum_rows(const Step& step) {
  load_q(step, 0), load_do(step, 0);
  RowValues p_sums[PartS::kBlocks]{}, ds_sums[PartS::kBlocks]{};
  const int last_query = min(step.query + kQueries, w.q.tokens) - 1;
  const KeyRange top = a.mask.keys_of(step.query, w.q.tokens, w.k.tokens),
                 bottom = a.mask.keys_of(last_query, w.q.tokens, w.k.tokens);
  for (int key = top.first / kKeys * kKeys; key < bottom.last; key += kKeys) {
    __syncthreads();  // all warps have read the keys before
    if (threadIdx.x == 0)
      shared.key_block.first_key = key, shared.key_block.block = w.k.first_block + key / Tiles::kKeys;
    __syncthreads();
    load_keys(), load_mask(step, true);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    TileS s, dp, derivative;  // the rows are those of ds before the derivative of a softcap multiplies it
    for (auto& block : s) block.zero();
    for (auto& block : dp) block.zero();
    mma_ABt(dp, TileQ{shared.do_[0]}, PartS::row_block(warp), TileK{shared.v}, PartS::column_block(warp));
    mma_ABt(s, TileQ{shared.q[0]}, PartS::row_block(warp), TileK{shared.k}, PartS::column_block(warp));
    add_logit_terms(s, dp, derivative, step, 0);
    take_p(s, 0);
    hide(s, step.query);
    take_ds(s, dp, 0);
#pragma unroll
    for (int m = 0; m < PartS::kBlocks; ++m)
#pragma unroll
      for (int i = 0; i < PartS::kColumns / 2; ++i)
        p_sums[m][i / 2 % 2] += rounded<T>(s[m].x[i]), ds_sums[m][i / 2 % 2] += rounded<T>(dp[m].x[i]);
  }
  auto& memory = shared.projection;
#pragma unroll
  for (int m = 0; m < PartS::kBlocks; ++m)
#pragma unroll
    for (int half = 0; half < kRowsPerThread; ++half) {
      const int row = 16 * (PartS::row_block(warp) + m) + lane / 4 + 8 * half, part = warp / C::kSWarpRows;
      const float p = quad_sum(p_sums[m][half]), ds = quad_sum(ds_sums[m][half]);
      if (lane % 4 == 0) memory.p_sums[part][row] = p, memory.ds_sums[part][row] = ds;
    }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();  // q and do, where no key is seen
  __syncthreads();
  if (const int row = threadIdx.x; row < kQueries) {
    float p = 0.f, ds = 0.f;
    for (int part = 0; part < PartS::kColumnParts; ++part)
      p += memory.p_sums[part][row], ds += memory.ds_sums[part][row];
    write_lambda(step, row, p, ds);
  }
}

// Writes lambda of a row of a tile, from its sums over the keys. A query that is not of this part has a p of 0 in it.
template <class T, int Dim, BackwardKind kind>
__device__ void Backward<T, Dim, kind>::write_lambda(const Step& step, int row, float p, float ds) const {
  const Projection& projection = params.projection;
  float& lambda = projection.lambda[int64_t{step.tile} * Tiles::kQueries + step.first + row];
  if (w.part == 0) lambda = 0.f;
  if (shared.lse[0][row] == INFINITY) return;
  const Index4 at{w.batch, step.head, int64_t{w.q.first} + step.query + row, 0};
  const auto number = [&](const Strided& x) { return static_cast<const float*>(x.data)[at.offset(x)]; };
  const float unit = power_of_two(e.p), scale = power_of_two(e.do_ + e.v + e.product);
  const float p_sink =
      projection.sinks.data ? expf(projection.sinks.at(w.batch, step.head) - number(projection.lse)) : 0.f;
  const float dlse = projection.dlse.data ? number(projection.dlse) * scale : 0.f;
  p += unit * p_sink, ds -= unit * (p_sink * shared.delta[0][row] + dlse);
  lambda = p == 0.f ? 0.f : ds / p;
}

template <class T, int Dim, BackwardKind kind>
__device__ void Backward<T, Dim, kind>::load_lambda(const Step& step, int stage) const {
  if constexpr (Projects) {
    constexpr int kChunks = kQueries * sizeof(float) / kChunkBytes;
    static_assert(kChunks <= kThreads);
    const int i = threadIdx.x * 4;
    const float* const from = params.projection.lambda + int64_t{step.tile} * Tiles::kQueries + step.first;
    if (threadIdx.x < kChunks)
      ptx::cp_async(ptx::shared_address(&shared.projection.lambda[stage][i]), from + i, kChunkBytes);
  }
}

// Multiplies ds and rounded p by the derivative of a softcap, and stores that p. What is not seen stays 0, whatever its
// derivative is.
template <class T, int Dim, BackwardKind kind>
__device__ void Backward<T, Dim, kind>::take_projection(TileS& p, TileS& ds, const TileS& derivative) const {
#pragma unroll
  for (int m = 0; m < PartS::kBlocks; ++m)
#pragma unroll
    for (int i = 0; i < PartS::kColumns / 2; ++i) {
      float &x = p[m].x[i], &y = ds[m].x[i];
      y = x == 0.f ? 0.f : y * derivative[m].x[i];
      x = x == 0.f ? 0.f : rounded<T>(x) * derivative[m].x[i];
    }
  store(p, shared.projection.p);
}

// dq = -lambda p k
template <class T, int Dim, BackwardKind kind>
__device__ void Backward<T, Dim, kind>::project(TileDq& dq, int half, int stage) const {
  mma_AB<kKeys>(dq, TileP{shared.projection.p}, PartDq::row_block(warp), TileK{shared.k},
                PartDq::column_block(warp) + half * (kDqColumns / 16));
#pragma unroll
  for (int m = 0; m < PartDq::kBlocks; ++m) {
    const float* const lambda = &shared.projection.lambda[stage][16 * (PartDq::row_block(warp) + m) + lane / 4];
    scale_rows(dq[m], {-lambda[0], -lambda[8]});
  }
}

// dk -= p^T (lambda q). lambda q, rounded, takes the place of q. A row whose lambda is NaN has a ds of NaN for each key
// that it sees; keys that it does not see meet 0 here.
template <class T, int Dim, BackwardKind kind>
__device__ void Backward<T, Dim, kind>::project(TileDk& dk, const TileQ& q, int stage) const {
  __syncthreads();  // all warps have read q
  for (int i = threadIdx.x * kChunkBytes; i < TileQ::kBytes; i += kThreads * kChunkBytes) {
    const float lambda = shared.projection.lambda[stage][i % TileQ::kPanelBytes / kPanelRowBytes];
    const float by = isnan(lambda) ? 0.f : -lambda;
    auto* const pairs = reinterpret_cast<uint32_t*>(q.data + i);
    for (int pair = 0; pair < kChunkBytes / 4; ++pair) {
      const float2 x = ptx::unpack<T>(pairs[pair]);
      pairs[pair] = by == 0.f ? 0 : ptx::pack<T>(x.x * by, x.y * by);
    }
  }
  __syncthreads();
  mma_AtB(dk, TileP{shared.projection.p}, PartK::row_block(warp), q, PartK::column_block(warp), [](int) {});
}

}  // namespace octet::cuda::sm80
