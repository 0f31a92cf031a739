// The mainloop of the backward pass. sm80/bwd/backward.h has the algorithm.
#pragma once
#include "cuda/fragment/mask.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm80/bwd/mainloop_blocks.h"

namespace octet::cuda::sm80 {

template <class Kind>
__device__ void Backward<Kind>::run(unsigned number) {
  if (threadIdx.x == 0) {
    KeyBlockInfo& block = shared.key_block;
    KeyBlockScheduler<Tiles::kQueries, Tiles::kKeys>{a}.find(number / kTilesOfKeyBlock, block);
    block.first_key += static_cast<int>(number % kTilesOfKeyBlock) * kKeys;
    block.tiles = KeyBlockScheduler<kQueries, kKeys>{a}.tiles_of(block);
    block.bin = -1;
  }
  __syncthreads();
  if (!w.valid() || w.k.index < 0 || w.first_key >= w.k.tokens) return;
  if constexpr (kMasked) skip_hidden_queries();
  load_keys();
  [[maybe_unused]] const VPart v = take_v();
  do {
    next_bin();
    TileDk dk, dv;
    for (auto& block : dk) block.zero();
    for (auto& block : dv) block.zero();
    if constexpr (C::kKeysAsRows)
      compute_by_keys(dk, dv);
    else if constexpr (kWide)
      compute_wide(v, dk, dv);
    else
      compute(dk, dv);
    write(a.dv, dv, kGeneral ? params.dropout.scale : 1.f, -e.p - e.do_, a.dim_v);
    write(a.dk, dk, a.scale, -e.p - e.product - e.do_ - e.v - e.q, a.dim);
  } while (w.bin + 1 < e.bins);
  ptx::cp_async_wait<0>();
}

template <class Kind>
__device__ void Backward<Kind>::load_keys() const {
  const int64_t tile = int64_t{w.batch * a.kv_heads + w.kv_head} * a.k_blocks.count + w.block;
  const int64_t bytes = tile * (Tiles::kKeys * kDim * static_cast<int64_t>(sizeof(T)));
  load_async<kThreads, Tiles::kKeys>(TileK{shared.k}, a.k + bytes, w.first_key % Tiles::kKeys);
  if constexpr (Operands::kReadsV)
    load_async<kThreads, Tiles::kKeys>(TileK{kWide ? shared.q[0] : shared.v}, a.v + bytes, w.first_key % Tiles::kKeys);
  Operands::load_keys(*this);
}

// Leaves out the tiles of queries before the first and behind the last from which the mask does not hide the keys.
template <class Kind>
__device__ void Backward<Kind>::skip_hidden_queries() const {
  if (!has_mask_tile() || warp > 0) return;
  const int group = a.heads / a.kv_heads;
  Interval seen{w.tiles.last, w.tiles.first};
  for (int head = w.kv_head * group; head < (w.kv_head + 1) * group; ++head) {
    const Interval of_head =
        seen_tiles(mask_classes(head, 0), params.mask_classes.row_stride, w.tiles.first, w.tiles.last);
    seen = {min(seen.first, of_head.first), max(seen.last, of_head.last)};
  }
  __syncwarp();
  if (lane > 0) return;
  const bool starts_inside = seen.first <= w.tiles.start && w.tiles.start < seen.last;
  shared.key_block.tiles = {seen.first, max(seen.first, seen.last), starts_inside ? w.tiles.start : seen.first};
}

// Goes on to the next bin of the queries, once all warps have computed the bin before.
template <class Kind>
__device__ void Backward<Kind>::next_bin() {
  __syncthreads();
  if (threadIdx.x == 0) {
    ++shared.key_block.bin;
    shared.exponents = a.exponents[(w.bin * a.batch + w.batch) * a.kv_heads + w.kv_head];
    shared.group = a.heads / a.kv_heads;
    shared.iterations = shared.group * w.tiles.count();
    shared.q_k_scale = Operands::q_k_scale(e);
    shared.scale_log2 = !kPlain ? 1.44269504f : a.scale * 1.44269504f * shared.q_k_scale;
    shared.dq_scale = exp2f(static_cast<float>(e.dq));
    shared.product_scale = Operands::product_scale(e) * (kGeneral ? params.dropout.scale : 1.f);
    Operands::start_bin(*this);
  }
  __syncthreads();
}

// Finds the step of iteration n, whose tile is `at`, and goes on to the next tile.
template <class Kind>
__device__ typename Backward<Kind>::Step Backward<Kind>::next_step(MBlock& at, int n) const {
  const int head = w.kv_head * shared.group + at.head;
  const Step step{(w.batch * a.heads + head) * a.q_blocks.count + w.q.first_block + at.tile / kTilesOfQueryBlock,
                  at.tile % kTilesOfQueryBlock * kQueries, at.tile * kQueries, head};
  if (threadIdx.x == 0) shared.steps[n % kSteps] = step;
  at.advance(w.tiles, shared.group);
  return step;
}

// Starts the copies of q, lse and delta.
template <class Kind>
__device__ void Backward<Kind>::load_q(const Step& step, int stage) const {
  load_queries(shared.q[kQStages < kStages ? 0 : stage], a.q, step);
  constexpr int kChunks = kQueries * sizeof(float) / kChunkBytes;
  static_assert(2 * kChunks <= kThreads);
  const Rows& rows = rows_at<Tiles::kQueries>(a.rows, w.bin, a.q_tiles(), step.tile);
  const int i = threadIdx.x % kChunks * 4;
  if (threadIdx.x < kChunks)
    ptx::cp_async(ptx::shared_address(&shared.lse[stage][i]), &rows.lse[step.first + i], kChunkBytes);
  else if (threadIdx.x < 2 * kChunks)
    ptx::cp_async(ptx::shared_address(&shared.delta[stage][i]), &rows.delta[step.first + i], kChunkBytes);
  Operands::load_q(*this, step, stage);
}

template <class Kind>
__device__ void Backward<Kind>::load_do(const Step& step, int stage) const {
  load_queries(shared.do_[stage], a.do_, step);
  Operands::load_do(*this, step, stage);
}

// Starts the copy of the class of iteration n, whose tile is `at`.
template <class Kind>
__device__ void Backward<Kind>::load_mask_class(const MBlock& at, int n) const {
  if (has_mask_tile() && threadIdx.x == 0)
    ptx::cp_async_word(ptx::shared_address(&shared.mask_class[n % kSteps]),
                       mask_classes(w.kv_head * shared.group + at.head, at.tile));
}

// Starts the copies of the row biases of a tile's rows and, if asked to, of the tile of the mask tensor.
template <class Kind>
__device__ void Backward<Kind>::load_mask(const Step& step, bool tile, int stage) const {
  if (!has_mask_tile()) return;
  const LogitTerms& t = params.terms;
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
  if (tile)
    load_mask_tile<kThreads, kQueries, kKeys>(mask_tile(), thread, t, w.batch, step.head, step.query, w.q.tokens,
                                              w.first_key, w.k.tokens);
  if (t.row_bias && thread < kQueries)
    ptx::cp_async_word(ptx::shared_address(&shared.row_bias[stage][thread]),
                       t.row_bias_at(w.batch, step.head, min(step.query + thread, w.q.tokens - 1)));
}

// Turns s into scale s + mask - row bias, or into scale s without a mask tensor. `needs_tile`: the mask is not 0.
template <class Kind>
__device__ void Backward<Kind>::add_mask_tile(TileS& s, float scale, bool needs_tile, int stage) const {
  if (!has_mask_tile()) {
    for (auto& block : s) block.scale(scale);
    return;
  }
  // opaque() stops the compiler from keeping addresses for each type of mask in registers.
  const int first = 16 * PartS::row_block(warp) + ptx::opaque(lane) / 4;
#pragma unroll
  for (int m = 0; m < PartS::kBlocks; ++m) {
    const int row = first + 16 * m;
    const float row_bias[] = {shared.row_bias[bias_stage(stage)][row], shared.row_bias[bias_stage(stage)][row + 8]};
    const int column = 16 * PartS::column_block(warp) + fragment_column();
    if (needs_tile) {
      MaskFragment<kKeys>{mask_tile(), params.terms.element, row, column}.add(s[m], scale, row_bias);
    } else {
      const bool any = params.terms.row_bias;
      subtract_row_bias(s[m], scale, {any ? row_bias[0] : 0.f, any ? row_bias[1] : 0.f});
    }
  }
}

// Returns false if each query of a tile sees all keys of the block.
template <class Kind>
__device__ bool Backward<Kind>::needs_mask(int query) const {
  if (w.first_key + kKeys > w.k.tokens) return true;
  return a.mask.keys_of(query, w.q.tokens, w.k.tokens).last < w.first_key + kKeys ||
         a.mask.keys_of(query + kQueries - 1, w.q.tokens, w.k.tokens).first > w.first_key;
}

// Finds the elements of P of this thread that dropout keeps.
template <class Kind>
__device__ void Backward<Kind>::find_kept(const Step& step, Kept& kept) const {
  if (params.dropout.seed)
    cuda::find_kept(kept, params.dropout.stream(sequence(), step.head), params.dropout.dropped,
                    step.query + 16 * PartS::row_block(warp) + lane / 4, w.first_key + 16 * PartS::column_block(warp));
}

// Turns s into logits, and dp into dp - delta times the derivative of a softcap.
template <class Kind>
__device__ void Backward<Kind>::add_logit_terms(TileS& s, TileS& dp, const Step& step, int stage) const {
  const LogitTerms& terms = params.terms;
  const float scale = shared.q_k_scale * terms.scale;
  const float scale_left = terms.softcap != 0.f ? 1.f : scale;
#pragma unroll
  for (int m = 0; m < PartS::kBlocks; ++m) {
    const float* const delta = &shared.delta[stage][16 * (PartS::row_block(warp) + m) + lane / 4];
    const float deltas[kRowsPerThread] = {delta[0], delta[8]};
    const RowValues product_scale = product_scales(stage, m);
#pragma unroll
    for (int i = 0; i < PartS::kColumns / 2; ++i) {
      float &x = s[m].x[i], &y = dp[m].x[i];
      y = __fmaf_rn(y, product_scale[i / 2 % 2], -deltas[i / 2 % 2]);
      if (terms.softcap == 0.f) continue;
      const Capped capped = softcap(terms, x * scale);
      x = capped.x, y *= C::kOfAdded ? 1.f : capped.derivative;
    }
  }
  if (has_mask_tile() && !terms.slopes) return add_mask_tile(s, scale_left, true, stage);
#pragma unroll
  for (int m = 0; m < PartS::kBlocks; ++m) {
    RowTerms rows[kRowsPerThread];
#pragma unroll
    for (int half = 0; half < kRowsPerThread; ++half) {
      const int i = step.query + 16 * (PartS::row_block(warp) + m) + lane / 4 + 8 * half;
      const Interval seen = a.mask.keys_of(min(i, w.q.tokens - 1), w.q.tokens, w.k.tokens);
      rows[half] = row_terms(terms, w.batch, sequence(), step.head, i, w.q.tokens, w.k.tokens, seen);
    }
    add_terms(s[m], scale_left, terms, rows, w.first_key + 16 * PartS::column_block(warp), w.k.tokens);
  }
}

// Turns s into p = exp(scale s - lse), also where a query does not see a key.
template <class Kind>
__device__ void Backward<Kind>::take_p(TileS& s, int stage) const {
  const float scale_log2 = shared.scale_log2;
#pragma unroll
  for (int m = 0; m < PartS::kBlocks; ++m) {
    const int row = 16 * (PartS::row_block(warp) + m) + lane / 4;
#pragma unroll
    for (int half = 0; half < kRowsPerThread; ++half) {
      const float lse = shared.lse[stage][row + 8 * half];
#pragma unroll
      for (int i = 0; i < PartS::kColumns / 8; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[m].x[4 * i + 2 * half + c];
          if constexpr (Operands::kSubtractsLse && kPlain)
            x = ptx::exp2(x);
          else if constexpr (!Operands::kRecomputes)
            x = x == -INFINITY ? 0.f : ptx::exp2(__fmaf_rn(x, scale_log2, -lse));
          else
            x = ptx::exp2(__fmaf_rn(x, scale_log2, -lse));
        }
    }
  }
}

// Sets p to 0 where a query does not see a key.
template <class Kind>
__device__ void Backward<Kind>::hide(TileS& p, int query) const {
  if (!needs_mask(query)) return;
  // opaque() stops the compiler from keeping what follows in registers throughout the kernel.
  const int warp = ptx::opaque(this->warp), lane = ptx::opaque(this->lane);
#pragma unroll
  for (int m = 0; m < PartS::kBlocks; ++m) {
    const int row = query + 16 * (PartS::row_block(warp) + m) + lane / 4;
    const Interval ranges[kRowsPerThread] = {a.mask.keys_of(row, w.q.tokens, w.k.tokens),
                                             a.mask.keys_of(row + 8, w.q.tokens, w.k.tokens)};
    mask_rows(p[m], w.first_key + 16 * PartS::column_block(warp), ranges, 0.f);
  }
}

// Turns dp into ds = p (dp - delta). With general logits, dp is the second factor already, and what hides a key leaves
// a ds of 0, whatever dp is.
template <class Kind>
__device__ void Backward<Kind>::take_ds(const TileS& p, TileS& dp, int stage) const {
#pragma unroll
  for (int m = 0; m < PartS::kBlocks; ++m) {
    const float* const delta = &shared.delta[stage][16 * (PartS::row_block(warp) + m) + lane / 4];
    const float deltas[kRowsPerThread] = {delta[0], delta[8]};
    const RowValues product_scale = product_scales(stage, m);
#pragma unroll
    for (int i = 0; i < PartS::kColumns / 2; ++i)
      if constexpr (kGeneral)
        dp[m].x[i] = p[m].x[i] == 0.f ? 0.f : p[m].x[i] * dp[m].x[i];
      else
        dp[m].x[i] = p[m].x[i] * __fmaf_rn(dp[m].x[i], product_scale[i / 2 % 2], -deltas[i / 2 % 2]);
  }
}

// Writes p or ds to a tile, from column 16 `column_block` on.
template <class Kind>
__device__ void Backward<Kind>::store(const OperandS& x, unsigned char* tile, int column_block) const {
  static_assert(PartS::kColumns <= kPanelColumns);
  // opaque() stops the compiler from keeping all addresses in registers throughout the kernel.
  const int first = ptx::opaque(TileP::offset(16 * PartS::row_block(warp) + lane / 4, 2 * column_block) + lane % 4 * 4);
#pragma unroll
  for (int m = 0; m < PartS::kBlocks; ++m)
#pragma unroll
    for (int i = 0; i < PartS::kColumns / 8; ++i)
#pragma unroll
      for (int half = 0; half < kRowsPerThread; ++half)
        *reinterpret_cast<uint32_t*>(tile + (first ^ i * kChunkBytes) + (16 * m + 8 * half) * kPanelRowBytes) =
            x[m].x[2 * i + half];
}

// Rounds p or ds, and writes it to a tile.
template <class Kind>
__device__ void Backward<Kind>::store(const TileS& x, unsigned char* tile) const {
  OperandS rounded;
#pragma unroll
  for (int m = 0; m < PartS::kBlocks; ++m) convert(x[m], rounded[m]);
  store(rounded, tile, PartS::column_block(warp));
}

// The iterations of one bin of the queries.
template <class Kind>
__device__ void Backward<Kind>::compute(TileDk& dk, TileDk& dv) {
  const TileK k{shared.k};
  const TileP p{shared.p[0]}, ds{shared.ds[0]};
  MBlock at = first_tile();  // of the next iteration that is loaded
  if (shared.iterations) {
    const Step step = next_step(at, 0);
    load_q(step, 0), load_do(step, 0);
    if constexpr (!kPlain) load_mask(step, true);
    // A tile of the mask is loaded an iteration ahead, so its class is read two iterations ahead.
    if constexpr (kMasked) load_mask_class(first_tile(), 0), load_mask_class(at, 1);
  }
  ptx::cp_async_commit();
  constexpr bool kPrepares = Operands::template kPrepares<Backward>;
  if constexpr (kPrepares) {
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (shared.iterations) Operands::prepare(*this, 0);
  }
  for (int n = 0; n < shared.iterations; ++n) {
    const int stage = n % kStages, do_stage = n % kDoStages;
    const TileQ q{shared.q[stage]}, do_{shared.do_[do_stage]};
    ptx::cp_async_wait<0>();
    __syncthreads();
    const Step& step = shared.steps[n % kSteps];
    const bool more = n + 1 < shared.iterations;
    if (more) {
      const Step next = next_step(at, n + 1);
      if (kStages > 1) load_q(next, (n + 1) % kStages);
      if (kDoStages > 1) load_do(next, (n + 1) % kDoStages);
    }
    ptx::cp_async_commit();
    // s = q k^T and dp = do v^T, and p and ds of them.
    TileS s, dp;
    [[maybe_unused]] Kept kept;
    if constexpr (kGeneral) {
      Operands::multiply_dp(*this, dp, do_stage);
      find_kept(step, kept), drop_from(dp, kept);
    }
    Operands::multiply_s(*this, s, stage);
    if constexpr (kGeneral)
      add_logit_terms(s, dp, step, stage);
    else if constexpr (!kPlain)
      add_mask_tile(s, shared.q_k_scale * a.scale, needs_mask_tile(n), stage);
    take_p(s, stage);
    if (!kGeneral) Operands::multiply_dp(*this, dp, do_stage);
    hide(s, step.query);
    if constexpr (!kGeneral && !Operands::kTileScales) store(s, p.data);
    take_ds(s, dp, stage);
    [[maybe_unused]] TileScales by;
    if constexpr (Operands::kTileScales) {
      by = Operands::round(*this, s, dp);
      Operands::load_do_values(*this, step);
      ptx::cp_async_commit();
    }
    if constexpr (kGeneral) drop_from(s, kept);
    if constexpr (kGeneral || Operands::kTileScales) store(s, p.data);
    store(dp, ds.data);
    if constexpr (kPrepares) ptx::cp_async_wait<0>();  // the next q has arrived
    __syncthreads();
    if constexpr (kPrepares)
      if (more) Operands::prepare(*this, (n + 1) % kStages);
    if constexpr (!kPlain) {
      const int next = ptx::opaque(n + 1);
      if (more) load_mask(shared.steps[next % kSteps], needs_mask_tile(next));
      if constexpr (kMasked) load_mask_class(at, n + 2);
      ptx::cp_async_commit();
    }
    if constexpr (Operands::kTileScales) {
      multiply_tiles(dk, dv, n, by);
      continue;
    }
    // dq += ds k, dv += p^T do, dk += ds^T q. do is free after dv, which matters where it has one stage. opaque() stops
    // the compiler from keeping addresses in registers throughout the loop.
    const int warp = ptx::opaque(this->warp);
    TileDq dq;
    const auto multiply_dq = [&](int half) {
      for (auto& block : dq) block.zero();
      mma_AB<kKeys>(dq, ds, PartDq::row_block(warp), k, PartDq::column_block(warp) + half * (kDqColumns / 16));
    };
    // `between` is called with the number of each 16 queries, first of dv and then of dk.
    const auto multiply_dv_and_dk = [&](const auto& between) {
      mma_AtB(dv, p, PartK::row_block(warp), do_, PartK::column_block(warp), between);
      if (kDoStages == 1) {
        __syncthreads();
        if (more) load_do(shared.steps[(n + 1) % kSteps], 0);
        ptx::cp_async_commit();
      }
      mma_AtB(dk, ds, PartK::row_block(warp), q, PartK::column_block(warp),
              [&](int k_step) { between(kQueries / 16 + k_step); });
    };
    if (C::kSpreadsDq && !params.integers) {
      multiply_dq(0);
      float* const sums = float_sums(step);
      const float scale = shared.dq_scale;
      multiply_dv_and_dk([&](int slot) { add_share(dq, sums, scale, slot, 2 * kQueries / 16); });
      continue;
    }
    multiply_dv_and_dk([](int) {});
    for (int half = 0; half < (C::kDqHalves ? 2 : 1); ++half) multiply_dq(half), add(dq, step, half);
  }
}

}  // namespace octet::cuda::sm80
