// The mainloop of the backward pass in which keys are the rows of s and dp: s^T = k q^T, dp^T = v do^T.
//
// A warp has 32 keys, and 32 queries at a time. Its p^T and ds^T are then the left operands of dv and dk of its keys as
// they lie in its registers. At head dim 64 it takes all queries of a tile so, one half after the other, and has all
// channels of dv and dk. At 128 these would not fit into its registers: two warps share the keys, each has one half of
// the queries and one half of the channels, and takes p^T and ds^T of the other half of the queries from shared memory.
// dq sums over the keys of all warps and takes all of ds from there.
//
// Tiles of queries are loaded two iterations ahead. An iteration has one barrier, where ds is written and the next tile
// has arrived, and with one buffer of ds another one before it is written.
#pragma once
#include "cuda/sm80/bwd/mainloop.h"

namespace octet::cuda::sm80 {

// The same tile, of whose addresses as a left operand the compiler keeps nothing in registers.
template <class Tile>
struct WithoutAddresses : Tile {
  static __device__ uint32_t lane_right() {
    const int lane = ptx::opaque(static_cast<int>(threadIdx.x)) % 32;
    return Tile::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }
};

// Turns s^T into p^T = exp(scale s^T - lse), also where a query does not see a key. `first`: the query of column 0, in
// the tile.
template <class Kind>
__device__ void Backward<Kind>::take_p_by_keys(TileS& s, int first, int stage) const {
  const float scale_log2 = shared.scale_log2;
  const float* const lse = &shared.lse[stage][first + fragment_column()];
#pragma unroll
  for (int i = 0; i < PartS::kColumns / 8; ++i) {
    const auto of_columns = *reinterpret_cast<const float2*>(lse + 8 * i);
#pragma unroll
    for (auto& block : s)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& x = block.x[4 * i + j];
        if constexpr (Operands::kSubtractsLse && kPlain)
          x = ptx::exp2(x);
        else
          x = ptx::exp2(__fmaf_rn(x, scale_log2, j % 2 ? -of_columns.y : -of_columns.x));
      }
  }
}

// Returns the queries that see a key; none where it is none.
__device__ inline Interval queries_of(const Mask& mask, int key, int queries, int keys) {
  if (key >= keys) return {0, 0};
  return mask.queries_of(key, queries, keys);
}

// Sets p^T to 0 where a query does not see a key. `query`: that of column 0, in the sequence.
template <class Kind>
__device__ void Backward<Kind>::hide_by_keys(TileS& p, int query) const {
#pragma unroll
  for (int m = 0; m < PartS::kBlocks; ++m) {
    const int key = w.first_key + 16 * (PartS::row_block(warp) + m) + lane / 4;
    const Interval ranges[kRowsPerThread] = {queries_of(a.mask, key, w.q.tokens, w.k.tokens),
                                             queries_of(a.mask, key + 8, w.q.tokens, w.k.tokens)};
    mask_rows(p[m], query, ranges, 0.f);
  }
}

// Turns dp^T into ds^T = p^T (dp^T - delta).
template <class Kind>
__device__ void Backward<Kind>::take_ds_by_keys(const TileS& p, TileS& dp, int first, int stage) const {
  const float* const delta = &shared.delta[stage][first + fragment_column()];
#pragma unroll
  for (int i = 0; i < PartS::kColumns / 8; ++i) {
    const auto of_columns = *reinterpret_cast<const float2*>(delta + 8 * i);
    const float2 scale = product_scales_by_keys(stage, first + fragment_column() + 8 * i);
#pragma unroll
    for (int m = 0; m < PartS::kBlocks; ++m)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& x = dp[m].x[4 * i + j];
        x = p[m].x[4 * i + j] * __fmaf_rn(x, j % 2 ? scale.y : scale.x, j % 2 ? -of_columns.y : -of_columns.x);
      }
  }
}

// Returns where this warp keeps numbers of the mask tensor: those of its keys, for the queries of one pass.
template <class Kind>
__device__ unsigned char* Backward<Kind>::mask_tile_by_keys() const {
  return mask_tile() + ptx::opaque(warp) * (32 * mask_row_bytes(kMaskColumns, params.terms.mask_bytes));
}

// Starts the copies of the row biases of a tile's queries, which are 0 where the mask is bool.
template <class Kind>
__device__ void Backward<Kind>::load_row_biases(const Step& step, int stage) const {
  const LogitTerms& t = params.terms;
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
  if (thread >= kQueries) return;
  const void* const from =
      t.row_bias ? t.row_bias_at(w.batch, step.head, min(step.query + thread, w.q.tokens - 1)) : t.mask;
  ptx::cp_async_word(ptx::shared_address(&shared.row_bias[stage][thread]), from, !t.row_bias);
}

// Starts the copies of this warp's part of the mask tensor for a pass of iteration n, if it is needed.
template <class Kind>
__device__ void Backward<Kind>::load_mask_by_keys(int n, int pass) const {
  if (needs_mask_tile(n)) {
    const LogitTerms& t = params.terms;
    const Step& step = shared.steps[n % kSteps];
    const int query = step.query + 32 * pass, key = w.first_key + 16 * PartS::row_block(ptx::opaque(warp));
    if (query + 32 <= w.q.tokens && key + kMaskColumns <= w.k.tokens) {
      load_whole_mask_tile<32, kMaskColumns>(mask_tile_by_keys(), t.mask_bytes,
                                             t.mask_at(w.batch, step.head, query, key),
                                             t.mask_stride[2] * t.mask_bytes);
    } else {
      load_mask_tile<32, 32, kMaskColumns>(mask_tile_by_keys(), ptx::opaque(lane), t, w.batch, step.head, query,
                                           w.q.tokens, key, w.k.tokens);
    }
  }
  ptx::cp_async_commit();
}

// Turns s^T of a pass of iteration n into scale s^T + mask - row bias, and starts to load the mask for the pass
// after it.
template <class Kind>
__device__ void Backward<Kind>::add_mask_by_keys(TileS& s, int n, int pass) const {
  const float scale = shared.q_k_scale * a.scale;
  const float* const row_bias = &shared.row_bias[n % kStages][32 * pass + fragment_column()];
  if (needs_mask_tile(n)) {
    if (pass > 0) ptx::cp_async_wait<0>(), __syncwarp();  // that of the first one has arrived with q and do
    MaskFragmentByKeys{mask_tile_by_keys(), params.terms.element}.add(s, scale, row_bias);
    __syncwarp();  // all lanes have read it
  } else {
#pragma unroll
    for (int i = 0; i < PartS::kColumns / 8; ++i) {
      const auto of_columns = *reinterpret_cast<const float2*>(row_bias + 8 * i);
#pragma unroll
      for (auto& block : s)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& x = block.x[4 * i + j];
          x = __fmaf_rn(x, scale, 0.f - (j % 2 ? of_columns.y : of_columns.x));
        }
    }
  }
  constexpr int kPasses = kQueries / kSColumns;
  const bool last = pass == kPasses - 1;
  if (!last || n + 1 < shared.iterations) load_mask_by_keys(n + last, last ? 0 : pass + 1);
}

// The iterations of one part of the queries.
template <class Kind>
__device__ void Backward<Kind>::compute_by_keys(TileDk& dk, TileDk& dv) {
  const TileK k{shared.k};
  // With factors of rows no register is left for it.
  std::conditional_t<Operands::kScalesRows, const int&, const int> iterations = shared.iterations;
  MBlock at = first_tile();  // of the next iteration that is loaded
  const auto load_next = [&](int n) {
    if (n < iterations) {
      const Step step = next_step(at, n);
      load_q(step, n % kStages), load_do(step, n % kStages);
      // The mask is loaded an iteration ahead, so its class is read with the tile before it.
      if constexpr (!kPlain) load_row_biases(step, n % kStages), load_mask_class(at, n + 1);
    }
    ptx::cp_async_commit();
  };
  if (!kPlain && iterations) load_mask_class(at, 0);
  load_next(0), load_next(1);
  ptx::cp_async_wait<1>();
  __syncthreads();
  constexpr bool kPrepares = Operands::template kPrepares<Backward>;
  if constexpr (kPrepares) {
    static_assert(kBuffers == 1);  // the first barrier of an iteration, by which the next q has arrived
    if (iterations) Operands::prepare(*this, 0);
    __syncthreads();
  }
  if constexpr (!kPlain)
    if (iterations) load_mask_by_keys(0, 0), ptx::cp_async_wait<0>(), __syncwarp();
  for (int n = 0; n < iterations; ++n) {
    const int stage = n % kStages;
    const TileQ q{shared.q[stage]}, do_{shared.do_[stage]};
    const TileP p_tile{shared.p[n % kBuffers]}, ds_tile{shared.ds[n % kBuffers]};
    const Step& step = shared.steps[n % kSteps];
#pragma unroll 1
    for (int pass = 0; pass < kQueries / kSColumns; ++pass) {
      const int block = PartS::column_block(warp) + pass * (kSColumns / 16);  // of 16 queries
      TileS p, ds;
      Operands::multiply_s_by_keys(*this, p, stage, block);
      if constexpr (!kPlain) add_mask_by_keys(p, n, pass);
      take_p_by_keys(p, 16 * block, stage);
      Operands::multiply_dp_by_keys(*this, ds, stage, block);
      if (needs_mask(step.query)) hide_by_keys(p, step.query + 16 * block);
      take_ds_by_keys(p, ds, 16 * block, stage);
      OperandS p_operand, ds_operand;
#pragma unroll
      for (int m = 0; m < PartS::kBlocks; ++m) convert(p[m], p_operand[m]), convert(ds[m], ds_operand[m]);
      if (kSharesP) store(p_operand, p_tile.data, block);
      mma_AB(dv, p_operand, do_, PartK::column_block(warp), block);
      if (kBuffers == 1 && pass == 0) {
        if constexpr (kPrepares) ptx::cp_async_wait<0>();  // the next q has arrived
        __syncthreads();                                   // all warps have read the ds before
      }
      store(ds_operand, ds_tile.data, block);
      mma_AB(dk, ds_operand, q, PartK::column_block(warp), block);
    }
    if constexpr (kPrepares)
      if (n + 1 < iterations) Operands::prepare(*this, (n + 1) % kStages);
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (kSharesP) load_next(n + 2);
    // opaque() stops the compiler from keeping addresses in registers, of which what is above takes all.
    const int warp = ptx::opaque(this->warp);
    TileDq dq;
    for (auto& x : dq) x.zero();
    using TileDs = std::conditional_t<Operands::kScalesRows, WithoutAddresses<TileP>, TileP>;
    mma_AtB(dq, TileDs{ds_tile}, PartDq::row_block(warp), k, PartDq::column_block(warp), [](int) {});
    if constexpr (!kSharesP) {
      load_next(n + 2);  // beside products that are in flight
      without_addresses().add(dq, step, 0);
    } else {
      static_assert(PartS::kWarpColumns == 2);
      constexpr int kSteps16 = PartS::kColumns / 16;
      const int other = kSteps16 - PartS::column_block(warp);
      // `between` is called with the number of each 16 queries, first of dv and then of dk.
      const auto multiply_other_half = [&](const auto& between) {
        mma_AB<PartS::kColumns>(dv, p_tile, PartK::row_block(warp), do_, PartK::column_block(warp), other, between);
        mma_AB<PartS::kColumns>(dk, ds_tile, PartK::row_block(warp), q, PartK::column_block(warp), other,
                                [&](int k_step) { between(kSteps16 + k_step); });
      };
      if (params.integers) {
        add_integers(dq, step, 0);
        multiply_other_half([](int) {});
      } else {
        float* const sums = float_sums(step);
        const float scale = shared.dq_scale;
        multiply_other_half([&](int slot) { add_share(dq, sums, scale, slot, 2 * kSteps16); });
      }
    }
  }
}

}  // namespace octet::cuda::sm80
