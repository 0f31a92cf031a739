// Backward attention (FlashAttention-2, arXiv 2307.08691, Algorithm 2), recomputing P from lse.
//
// A task owns a few tiles of kKeys keys of one head of k and v. For each tile and each block of queries that sees it, over all heads of q
// in the group:
//   s = q k^T,  dp = do v^T          matmul
//   p = exp(s - lse),  ds = p (dp - delta)
//   dv += p^T do,  dk += ds^T q      into the task's own memory
//   dq += ds k                       shared by all tiles of a head
// and at the end dk *= scale; after all tasks dq *= scale. The tiles add to dq in ascending order: each block of queries
// has a number in memory that says whose turn it is. So the bits of dq do not depend on the number of threads. Tasks
// start in ascending order of tiles, so a task only ever waits for tasks that have started.
#pragma once
#include <thread>

#include "cpu/kernels/backward_operands.h"

namespace octet::cpu::OCTET_ISA {

// Tiles that a task may own: the rows of q, do and dq come from far away once for all of them.
constexpr int64_t kTilesPerTask = 4;

// Scratch memory of one thread.
struct BackwardScratch {
  float *s, *dp;   // [kQueries][kKeys]; become p and ds
  float *dk, *dv;  // [kTilesPerTask * kKeys][columns]

  static BackwardScratch carve(const GradientOperands& w, Carver& carve) {
    BackwardScratch t;
    t.s = carve.take<float>(kQueries * kKeys);
    t.dp = carve.take<float>(kQueries * kKeys);
    t.dk = carve.take<float>(kTilesPerTask * kKeys * w.k_columns);
    t.dv = carve.take<float>(kTilesPerTask * kKeys * w.v_columns);
    return t;
  }
};

template <GradientFormat format>
OCTET_INLINE Vf round_element(Vf x) {
  if constexpr (format == GradientFormat::bf16) return round_bf16(x);
  if constexpr (format == GradientFormat::f16) return round_f16(x);
  return x;
}

// One row of a tile: s becomes p, dp becomes ds. Keys that the row does not see give exact zeros whatever they hold.
template <GradientFormat format, bool partial>
OCTET_INLINE void gradient_row(const TileRow& row, float to_logit, float unit, float lse, float delta, float* s, float* dp) {
  Vf x[kVectors];
  load_logits<partial>(s, row, to_logit, x);
  for (int v = 0; v < kVectors; ++v) {
    Vf p = exp2(x[v] * unit - lse);
    if constexpr (partial) p = x[v] == kMinusInfinity ? Vf{} : p;
    Vf ds = p * (load(dp + v * kLanes) - delta);
    if constexpr (partial) ds = x[v] == kMinusInfinity ? Vf{} : ds;
    store(s + v * kLanes, round_element<format>(p));
    store(dp + v * kLanes, round_element<format>(ds));
  }
}

inline void wait_for_turn(const int32_t* turn, int32_t tile) {
  for (int spins = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != tile; ++spins) {
    if (spins > 64) std::this_thread::yield();
#ifdef __x86_64__
    else _mm_pause();
#endif
  }
}

template <GradientFormat format>
struct Backward {
  const Problem& p;
  const BackwardPlan& plan;
  const GradientOperands& w;
  const Signs& signs;
  BackwardScratch scratch;

  // The `count` tiles from that of `block` on.
  void run(const Sequence& seq, const Block& block, int64_t count) {
    std::memset(scratch.dk, 0, sizeof(float) * count * kKeys * w.k_columns);
    std::memset(scratch.dv, 0, sizeof(float) * count * kKeys * w.v_columns);
    const int64_t first_tile = block.token / kKeys, last_tile = std::min(first_tile + count, (seq.k_tokens + kKeys - 1) / kKeys);
    for (int64_t h = block.head * p.group(); h < (block.head + 1) * p.group(); ++h)
      for (int64_t token = 0; token < seq.q_tokens; token += kQueries) {
        const int64_t rows = std::min(seq.q_tokens - token, kQueries);
        const KeyRange seen = tiles_of(p, seq, token, rows);
        for (int64_t tile = std::max(first_tile, seen.first); tile < std::min(last_tile, seen.last); ++tile)
          visit(seq, h, token, rows, tile, (block.first_tile + tile) * p.kv_heads + block.head, tile - first_tile);
      }
    store_gradients(seq, block, std::min(seq.k_tokens - block.token, count * kKeys));
  }

  // One tile of P: `index` is that of its keys among all tiles, `own` among the task's.
  void visit(const Sequence& seq, int64_t h, int64_t token, int64_t rows, int64_t tile, int64_t index, int64_t own) {
    const int64_t first = row_index(p, seq, h, token), kc = w.k_columns, vc = w.v_columns;
    const int64_t keys = std::min(seq.k_tokens - tile * kKeys, kKeys);
    const float *q = w.q + first * kc, *do_ = w.do_ + first * vc, *do_dv = w.do_dv + first * vc;
    float *dk = scratch.dk + own * kKeys * kc, *dv = scratch.dv + own * kKeys * vc;
    constexpr Strides rowwise{kKeys, 1}, columnwise{1, kKeys};
    matmul<F32, false>(q, {kc, 1}, w.k_transposed + index * p.dim * kKeys, kKeys, scratch.s, kKeys, rows, kKeys, p.dim);
    matmul<F32, false>(do_, {vc, 1}, w.v_transposed + index * p.dim_v * kKeys, kKeys, scratch.dp, kKeys, rows, kKeys, p.dim_v);
    softmax_tile(seq, h, token, rows, tile * kKeys, first);
    matmul<F32, true>(scratch.s, columnwise, do_dv, vc, dv, vc, kKeys, vc, rows);
    matmul<F32, true>(scratch.dp, columnwise, q, kc, dk, kc, kKeys, kc, rows);
    int32_t* turn = w.turn + first;
    wait_for_turn(turn, static_cast<int32_t>(tile));
    matmul<F32, true>(scratch.dp, rowwise, w.k + index * kKeys * kc, kc, w.dq + first * kc, kc, rows, kc, keys);
    __atomic_store_n(turn, static_cast<int32_t>(tile + 1), __ATOMIC_RELEASE);
  }

  void softmax_tile(const Sequence& seq, int64_t h, int64_t token, int64_t rows, int64_t key, int64_t first) {
    TileRow row{nullptr, nullptr, 0, 0, nullptr, p.mask.dtype, p.mask.stride[3]};
    const float unit = p.mask.present() ? kLog2e : p.scale * kLog2e;
    for (int64_t i = 0; i < rows; ++i) {
      const KeyRange seen = p.keys_of(token + i, seq.q_tokens, seq.k_tokens);
      row.first = static_cast<int>(seen.first > key ? seen.first - key : 0);
      row.last = static_cast<int>(seen.last < key + kKeys ? seen.last - key : kKeys);
      if (p.mask.present()) row.mask = mask_row(p, seq.batch, h, token + i, key);
      const float lse = w.lse[first + i], delta = w.delta[first + i];
      float *s = scratch.s + i * kKeys, *dp = scratch.dp + i * kKeys;
      if (row.first > 0 || row.last < kKeys || row.mask) gradient_row<format, true>(row, p.scale, unit, lse, delta, s, dp);
      else gradient_row<format, false>(row, p.scale, unit, lse, delta, s, dp);
    }
  }

  void store_gradients(const Sequence& seq, const Block& block, int64_t keys) {
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = seq.k_first + block.token + j;
      float* dk = scratch.dk + j * w.k_columns;
      multiply(dk, p.scale, p.dim);
      if (plan.logits.hadamard) hadamard_inverse(dk, signs.sign, p.dim);
      store_row(p.dk, seq.batch, block.head, at, dk);
      store_row(p.dv, seq.batch, block.head, at, scratch.dv + j * w.v_columns);
    }
  }
};

inline void store_dq(const Problem& p, const BackwardPlan& plan, const Sequence& seq, const Block& block, const Signs& signs, const GradientOperands& w) {
  const int64_t rows = std::min(seq.q_tokens - block.token, kQueries), first = row_index(p, seq, block.head, block.token);
  for (int64_t i = 0; i < rows; ++i) {
    float* dq = w.dq + (first + i) * w.k_columns;
    multiply(dq, p.scale, p.dim);
    if (plan.logits.hadamard) hadamard_inverse(dq, signs.sign, p.dim);
    store_row(p.dq, seq.batch, block.head, seq.q_first + block.token + i, dq);
  }
}

inline std::size_t backward_scratch_bytes(const GradientOperands& w) {
  Carver carve(nullptr);
  BackwardScratch::carve(w, carve);
  return carve.used();
}

inline std::size_t backward_workspace(const Problem& p, unsigned threads) {
  Carver carve(nullptr);
  const GradientOperands w = carve_gradient_operands(p, carve);
  return carve.used() + threads * backward_scratch_bytes(w);
}

template <GradientFormat format>
void backward_as(const Job& job, const BackwardPlan& plan) {
  const Problem& p = *job.problem;
  Carver carve(job.workspace);
  const GradientOperands w = carve_gradient_operands(p, carve);
  const std::size_t scratch_bytes = backward_scratch_bytes(w);
  char* scratch = carve.take<char>(static_cast<int64_t>(job.threads * scratch_bytes));
  const Signs signs(p.q, p.dim);
  if (plan.logits.smooth_k)
    parallel_for(job.threads, job.sequence_count * p.kv_heads, [&](int64_t task, unsigned) {
      KeySide side{};
      side.k_mean = w.k_mean;
      channel_statistics(p, plan.logits, job.sequences[task / p.kv_heads], task % p.kv_heads, task, side);
    });
  parallel_for(job.threads, job.key_tile_count, [&](int64_t task, unsigned) {
    const Block& block = job.key_tiles[task];
    prepare_key_tile(p, plan, job.sequences[block.sequence], block, signs, w);
  });
  parallel_for(job.threads, job.query_block_count, [&](int64_t task, unsigned) {
    const Block& block = job.query_blocks[task];
    prepare_queries(p, plan, job.sequences[block.sequence], block, signs, w);
  });
  const int64_t tiles_per_task = std::clamp<int64_t>(job.key_tile_count / (8 * job.threads), 1, kTilesPerTask);
  parallel_for(job.threads, job.key_tile_count, [&](int64_t task, unsigned thread) {
    const Block& block = job.key_tiles[task];
    if (block.token / kKeys % tiles_per_task) return;
    Carver own(scratch + thread * scratch_bytes);
    Backward<format> backward{p, plan, w, signs, BackwardScratch::carve(w, own)};
    backward.run(job.sequences[block.sequence], block, tiles_per_task);
  });
  parallel_for(job.threads, job.query_block_count, [&](int64_t task, unsigned) {
    const Block& block = job.query_blocks[task];
    store_dq(p, plan, job.sequences[block.sequence], block, signs, w);
  });
}

inline void backward(const Job& job) {
  const BackwardPlan plan = backward_plan(*job.problem);
  switch (plan.format) {
    case GradientFormat::f16: return backward_as<GradientFormat::f16>(job, plan);
    case GradientFormat::bf16: return backward_as<GradientFormat::bf16>(job, plan);
    default: return backward_as<GradientFormat::exact>(job, plan);
  }
}

}  // namespace octet::cpu::OCTET_ISA
