// Backward attention (FlashAttention-2, arXiv 2307.08691, Algorithm 2), recomputing p from lse.
//
// A task owns a few tiles of kKeys keys of one head of k and v. For each tile and each block of queries that sees it,
// over all heads of q in the group:
//   s = q k^T,  dp = do v^T          matmul
//   p = exp(s - lse),  ds = p (dp - delta), both rounded
//   dv += p^T do,  dk += ds^T q      into the task's own memory
//   dq += ds k                       shared by all tiles of a head
// and at the end dk *= scale; after all tasks dq *= scale. `delta` is that of attention minus dlse, and lse has the
// sink in it, so that neither is seen here. The tiles add to dq in ascending order: each block of queries has a number
// in memory that says whose turn it is, so the bits of dq do not depend on the number of threads. Tasks start in
// ascending order of tiles, so a task only ever waits for tasks that have started.
//
// All arithmetic is in f32; formats are imposed on the operands, which keeps every product of two of them exact.
#pragma once
#include <thread>

#include "cpu/attention/backward/tile.h"
#include "cpu/parallel.h"

namespace octet::cpu::OCTET_ISA {

// Tiles that a task may own: the rows of q, do and dq come from far away once for all of them.
constexpr int64_t kTilesPerTask = 4;

// Scratch memory of one thread.
struct BackwardScratch {
  float *s, *dp;   // [kQueries][kKeys]; become p and ds
  float* ds_rows;  // [kQueries][kKeys], migrated only: ds as the operand of dq
  // These are used where products run in tiles.
  Word *p_t, *ds_t, *ds;       // [kKeys][split_stride(kQueries)]: A of p^T do, ds^T q and ds k
  Word *q, *do_;               // [kQueries][split_stride]: A of q k^T and do v^T
  Word *q_by_row, *do_by_row;  // [words_of<Split>(kQueries)][columns]: B of ds^T q and p^T do
  float* product;              // [kQueries][k_columns], of a block of fewer rows than tiles have
  float *dk, *dv;              // [kTilesPerTask * kKeys][columns]

  static BackwardScratch allocate(const GradientOperands& w, WorkspaceAllocator& workspace) {
    BackwardScratch t;
    t.s = workspace.take<float>(kQueries * kKeys);
    t.dp = workspace.take<float>(kQueries * kKeys);
    t.ds_rows = workspace.take<float>(kQueries * kKeys);
    if (kSplits<Split>) {
      for (Word** x : {&t.p_t, &t.ds_t, &t.ds}) *x = workspace.take<Word>(kKeys * split_stride(kQueries));
      t.q = workspace.take<Word>(kQueries * split_stride(w.k_columns));
      t.do_ = workspace.take<Word>(kQueries * split_stride(w.v_columns));
      t.q_by_row = workspace.take<Word>(words_of<Split>(kQueries) * w.k_columns);
      t.do_by_row = workspace.take<Word>(words_of<Split>(kQueries) * w.v_columns);
      t.product = workspace.take<float>(kQueries * w.k_columns);
    }
    t.dk = workspace.take<float>(kTilesPerTask * kKeys * w.k_columns);
    t.dv = workspace.take<float>(kTilesPerTask * kKeys * w.v_columns);
    return t;
  }
};

#ifdef __AMX_BF16__
// `count` rows of up to kMaxDim numbers to rows of A, `stride` words apart, padded with zeros to whole tiles.
inline void split_rows(const float* rows, int64_t count, int64_t columns, int64_t stride, Word* out) {
  alignas(64) float row[kMaxDim] = {};
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(row, rows + i * columns, sizeof(float) * columns);
    split_row(row, padded<Split>(columns), part_words(columns), out + i * stride);
  }
}

#endif

inline void wait_for_turn(const int32_t* turn, int32_t tile) {
  for (int spins = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != tile; ++spins) {
    if (spins > 64) std::this_thread::yield();
#ifdef __x86_64__
    else
      _mm_pause();
#endif
  }
}

template <GradientFormat format>
struct Backward {
  const Problem& p;
  const BackwardPlan& plan;
  const GradientOperands& w;
  BackwardScratch scratch;

  // The `count` tiles from that of `block` on.
  void run(const Sequence& seq, const Block& block, int64_t count) {
    zero(scratch.dk, count * kKeys * w.k_columns);
    zero(scratch.dv, count * kKeys * w.v_columns);
    const int64_t first_tile = block.token / kKeys,
                  last_tile = std::min(first_tile + count, (seq.k_tokens + kKeys - 1) / kKeys);
    for (int64_t h = block.head * p.group(); h < (block.head + 1) * p.group(); ++h)
      for (int64_t token = 0; token < seq.q_tokens; token += kQueries) {
        const int64_t rows = std::min(seq.q_tokens - token, kQueries);
        const KeyRange seen = tiles_of(p, seq, token, rows);
        if (first_tile < seen.last && seen.first < last_tile) split_queries(row_index(p, seq, h, token), rows);
        for (int64_t tile = std::max(first_tile, seen.first); tile < std::min(last_tile, seen.last); ++tile)
          visit(seq, block, h, token, rows, tile, tile - first_tile);
      }
    store_gradients(seq, block, std::min(seq.k_tokens - block.token, count * kKeys));
  }

  // One tile of p; `own` is its number among the task's tiles.
  void visit(const Sequence& seq, const Block& block, int64_t h, int64_t token, int64_t rows, int64_t tile,
             int64_t own) {
    const int64_t first = row_index(p, seq, h, token), index = tile_index(block, tile), kc = w.k_columns,
                  vc = w.v_columns;
    float *dk = scratch.dk + own * kKeys * kc, *dv = scratch.dv + own * kKeys * vc, *dq = w.dq + first * kc;
    [[maybe_unused]] constexpr Strides columnwise{1, kKeys};
    products(first, rows, index, own, query_mean(seq, block, h, token));
    gradient_tile(seq, h, token, rows, tile);
    if (plan.smooth_blocks) give_back_query_mean(query_mean(seq, block, h, token), rows, dk);
    float row_sums[kQueries];
    if (plan.smooth_blocks)
      for (int64_t i = 0; i < rows; ++i) row_sums[i] = row_sum(scratch.dp + i * kKeys);
    const float* ds_rows = round_tiles(first, rows, index);
#ifdef __AMX_BF16__
    split_transposed(scratch.s, rows, scratch.p_t);
    split_transposed(scratch.dp, rows, scratch.ds_t);
#else
    matmul<F32, true>(scratch.s, columnwise, w.do_dv + first * vc, vc, dv, vc, kKeys, vc, rows);
    matmul<F32, true>(scratch.dp, columnwise, w.q + first * kc, kc, dk, kc, kKeys, kc, rows,
                      of_next_block(w.dq, first, kc, own));
#endif
    if (plan.gproj) {
      matmul<F32, true>(scratch.s, columnwise, w.lambda_q + first * kc, kc, dk, kc, kKeys, kc, rows);
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < kKeys; ++j) scratch.dp[i * kKeys + j] -= w.lambda[first + i] * scratch.s[i * kKeys + j];
    }
#ifdef __AMX_BF16__
    for (int64_t i = 0; i < rows; ++i)
      split_row(ds_rows + i * kKeys, kKeys, kTile.a_part, scratch.ds + i * kTile.a_row);
    fetch_next_block(w.dq, first, kc, own);
    split_matmul<true>(kTile, scratch.p_t, scratch.do_by_row, dv, vc, kKeys, vc);
    split_matmul<true>(kTile, scratch.ds_t, scratch.q_by_row, dk, kc, kKeys, kc);
#endif
    int32_t* turn = w.turn + first;
    wait_for_turn(turn, static_cast<int32_t>(tile));
    const Word* k = w.k_by_row + index * words_of<Split>(kKeys) * kc;
#ifdef __AMX_BF16__
    add_ds_k(rows, k, dq);
#else
    const int64_t keys = std::min(seq.k_tokens - tile * kKeys, kKeys);
    for (int64_t c = 0, width; c < kc; c += width) {
      width = std::min(kPanelColumns, kc - c);
      matmul<F32, true>(ds_rows, Strides{kKeys, 1}, k + kKeys * c, width, dq + c, kc, rows, width, keys);
    }
#endif
    if (plan.smooth_blocks)
      for (int64_t i = 0; i < rows; ++i) add_scaled(dq + i * kc, row_sums[i], w.tile_offset + index * kc);
    __atomic_store_n(turn, static_cast<int32_t>(tile + 1), __ATOMIC_RELEASE);
  }

  // Returns the rows of the next block of queries that the task's tile numbered `own` fetches: all tiles together fetch
  // all of it. A product reads six rows at a time, which hardware does not foresee.
  static Ahead of_next_block(const float* rows, int64_t first, int64_t columns, int64_t own) {
    constexpr int64_t kCount = kQueries / kTilesPerTask;
    return {rows + (first + kQueries + own * kCount) * columns, kCount * columns * static_cast<int64_t>(sizeof(float))};
  }

#ifdef __AMX_BF16__
  static_assert(kQueries == kKeys);
  static constexpr SplitShape kTile{
      .words = part_words(kKeys), .a_row = split_stride(kKeys), .a_part = part_words(kKeys)};

  static void fetch_next_block(const float* rows, int64_t first, int64_t columns, int64_t own) {
    of_next_block(rows, first, columns, own).fetch(0, 1, 1);
  }

  // The operands made of a block of q and do.
  void split_queries(int64_t first, int64_t rows) {
    const int64_t kc = w.k_columns, vc = w.v_columns;
    split_rows(w.q + first * kc, rows, kc, split_stride(kc), scratch.q);
    split_rows(w.do_dp + first * vc, rows, vc, split_stride(vc), scratch.do_);
    split_columns(w.q + first * kc, rows, kQueries, kc, scratch.q_by_row);
    split_columns(w.do_dv + first * vc, rows, kQueries, vc, scratch.do_by_row);
  }

  // x^T as A, for x [kQueries][kKeys] whose first `rows` rows count.
  static void split_transposed(float* x, int64_t rows, Word* out) {
    alignas(64) float columns[kKeys * kQueries];
    zero(x + rows * kKeys, (kQueries - rows) * kKeys);
    transpose(x, kQueries, kKeys, kKeys, columns);
    for (int64_t j = 0; j < kKeys; ++j)
      split_row(columns + j * kQueries, kQueries, kTile.a_part, out + j * kTile.a_row);
  }

  // dq += ds k
  void add_ds_k(int64_t rows, const Word* k, float* dq) {
    const int64_t kc = w.k_columns;
    if (rows == kQueries) return split_matmul<true>(kTile, scratch.ds, k, dq, kc, rows, kc);
    split_matmul<false>(kTile, scratch.ds, k, scratch.product, kc, rows, kc);
    for (int64_t i = 0; i < rows * kc; i += kLanes) store(dq + i, load(dq + i) + load(scratch.product + i));
  }
#else
  void split_queries(int64_t, int64_t) {}
#endif

  // `block` is one of keys.
  int64_t tile_index(const Block& block, int64_t tile) const {
    return (block.first_tile + tile) * p.kv_heads + block.head;
  }

  // With smooth_blocks, the mean of a block of queries.
  const float* query_mean(const Sequence& seq, const Block& block, int64_t h, int64_t token) const {
    return plan.smooth_blocks ? block_mean(p, seq, block.sequence, h, token, w) : nullptr;
  }

  void products(int64_t first, int64_t rows, int64_t index, int64_t own, const float* mean) {
    const int64_t kc = w.k_columns, vc = w.v_columns;
    const Word *k = w.k_transposed + index * words_of<Split>(p.dim) * kKeys,
               *v = w.v_transposed + index * words_of<Split>(p.dim_v) * kKeys;
#ifdef __AMX_BF16__
    const auto multiply = [&](const Word* a, const Word* b, int64_t dim, float* out) {
      split_matmul<false>({part_words(dim), split_stride(dim), part_words(dim)}, a, b, out, kKeys, rows, kKeys);
    };
    fetch_next_block(w.q, first, kc, own);
    multiply(scratch.q, k, kc, scratch.s);
    fetch_next_block(w.do_dp, first, vc, own);
    multiply(scratch.do_, v, vc, scratch.dp);
#else
    matmul<F32, false>(w.q + first * kc, {kc, 1}, k, kKeys, scratch.s, kKeys, rows, kKeys, p.dim,
                       of_next_block(w.q, first, kc, own));
    matmul<F32, false>(w.do_dp + first * vc, {vc, 1}, v, kKeys, scratch.dp, kKeys, rows, kKeys, p.dim_v,
                       of_next_block(w.do_dp, first, vc, own));
#endif
    if (plan.smooth_blocks) add_means(first, rows, index, mean);
  }

  // Adds to the logits what rounding left out of them: q.k = q'.k' + q.(tile mean) + (block mean).k'.
  void add_means(int64_t first, int64_t rows, int64_t index, const float* mean) {
    const int64_t kc = w.k_columns;
    alignas(64) float by_key[kKeys];
    for (int64_t j = 0; j < kKeys; ++j) by_key[j] = dot(mean, w.k_smooth + (index * kKeys + j) * kc);
    for (int64_t i = 0; i < rows; ++i) {
      const float by_row = dot(w.q_raw + (first + i) * kc, w.tile_mean + index * kc);
      for (int64_t j = 0; j < kKeys; j += kLanes)
        store(scratch.s + i * kKeys + j, load(scratch.s + i * kKeys + j) + load(by_key + j) + by_row);
    }
  }

  // dk += (column sums of ds) (mean of the block's q)^T
  void give_back_query_mean(const float* mean, int64_t rows, float* dk) {
    alignas(64) float sums[kKeys] = {};
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < kKeys; ++j) sums[j] += scratch.dp[i * kKeys + j];
    for (int64_t j = 0; j < kKeys; ++j) add_scaled(dk + j * w.k_columns, sums[j], mean);
  }

  float dot(const float* x, const float* y) const {
    Vf sum{};
    for (int64_t c = 0; c < w.k_columns; c += kLanes) sum += load(x + c) * load(y + c);
    return reduce_add(sum);
  }

  static float row_sum(const float* x) {
    Vf sum{};
    for (int64_t j = 0; j < kKeys; j += kLanes) sum += load(x + j);
    return reduce_add(sum);
  }

  void add_scaled(float* y, float a, const float* x) const {
    for (int64_t c = 0; c < w.k_columns; c += kLanes) store(y + c, load(y + c) + a * load(x + c));
  }

  float unit() const { return p.mask.present() ? kLog2e : p.scale * kLog2e; }

  void gradient_tile(const Sequence& seq, int64_t h, int64_t token, int64_t rows, int64_t tile) {
    const int64_t first = row_index(p, seq, h, token);
    for_rows(p, seq, h, token, rows, tile * kKeys, gauges(first), [&](int64_t i, const TileRow& keys, auto partial) {
      const GradientRow row{keys,
                            p.scale,
                            unit(),
                            w.lse[first + i],
                            w.delta[first + i],
                            plan.smooth_k_dq ? 0x1p15f : 1.f,
                            plan.smooth_k_dq};
      gradient_row<format, partial>(row, scratch.s + i * kKeys, scratch.dp + i * kKeys);
    });
  }

  // Rounding that needs a whole tile. Returns ds as the operand of dq.
  const float* round_tiles(int64_t first, int64_t rows, int64_t index) {
    if constexpr (format == GradientFormat::e4m3) round_tile<OCTET_E4M3>(scratch.dp, rows);
    if constexpr (format == GradientFormat::int8) {
      round_tile<OCTET_I8>(scratch.s, rows);
      round_tile<OCTET_I8>(scratch.dp, rows);
    }
    if constexpr (format == GradientFormat::migrated) {
      round_rows_of_tile(scratch.dp, rows, w.k_amax + index * kKeys, scratch.ds_rows);
      round_columns_of_tile(scratch.dp, rows, w.q_amax + first, 127.f);
      round_columns_of_tile(scratch.s, rows, w.do_amax + first, 255.f);
      return scratch.ds_rows;
    }
    return scratch.dp;
  }

  void store_gradients(const Sequence& seq, const Block& block, int64_t keys) {
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = seq.k_first + block.token + j;
      if (plan.hadamard) rotate_back(scratch.dk + j * w.k_columns, p.dim);
      multiply(scratch.dk + j * w.k_columns, p.scale, p.dim);
      store_row(p.dk, seq.batch, block.head, at, scratch.dk + j * w.k_columns);
      store_row(p.dv, seq.batch, block.head, at, scratch.dv + j * w.v_columns);
    }
  }

  const float* gauges(int64_t first) const { return w.gauge ? w.gauge + first : nullptr; }

  // Beside a large gauge lse has lost the bits of the logits: such rows get their own.
  void renew_lse(const Sequence& seq, const Block& block) {
    constexpr float kLarge = 16.f;
    const int64_t h = block.head, token = block.token, first = row_index(p, seq, h, token);
    const int64_t rows = std::min(seq.q_tokens - token, kQueries);
    const auto large = [&](int64_t i) { return __builtin_fabsf(w.gauge[first + i]) >= kLarge; };
    bool any = false;
    for (int64_t i = 0; i < rows; ++i) any |= large(i);
    if (!any) return;
    const Block keys{block.sequence, h / p.group(), 0, block.first_tile};
    const KeyRange tiles = tiles_of(p, seq, token, rows);
    RowSums sums[kQueries];
    split_queries(first, rows);
    for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
      products(first, rows, tile_index(keys, tile), 0, query_mean(seq, keys, h, token));
      for_rows(p, seq, h, token, rows, tile * kKeys, gauges(first), [&](int64_t i, const TileRow& row, auto partial) {
        sums[i].template add_logits<partial>(row, p.scale, unit(), scratch.s + i * kKeys, scratch.dp + i * kKeys);
      });
    }
    for (int64_t i = 0; i < rows; ++i) {
      float& lse = w.lse[first + i];
      if (!large(i) || lse != lse || lse == __builtin_inff()) continue;
      const double of_keys = w.sink ? 1.0 - w.sink[first + i] : 1.0;
      lse = static_cast<float>(sums[i].m + std::log2(sums[i].p) - std::log2(of_keys));
    }
  }

  // Computes what a block of queries must know of its whole rows before any tile: with Delta::from_p their sums, with
  // `gproj` the projection.
  void sweep(const Sequence& seq, const Block& block) {
    const int64_t h = block.head, token = block.token, first = row_index(p, seq, h, token);
    const int64_t rows = std::min(seq.q_tokens - token, kQueries);
    const Block keys{block.sequence, h / p.group(), 0, block.first_tile};
    const KeyRange tiles = tiles_of(p, seq, token, rows);
    RowSums sums[kQueries];
    for (int64_t i = 0; i < rows; ++i) sums[i] = sums_before_keys(seq, h, token + i);
    split_queries(first, rows);
    for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
      products(first, rows, tile_index(keys, tile), 0, query_mean(seq, keys, h, token));
      if (plan.gproj) {
        gradient_tile(seq, h, token, rows, tile);
        for (int64_t i = 0; i < rows; ++i) sums[i].add(scratch.s + i * kKeys, scratch.dp + i * kKeys);
      } else {
        for_rows(p, seq, h, token, rows, tile * kKeys, gauges(first), [&](int64_t i, const TileRow& row, auto partial) {
          sums[i].template add_logits<partial>(row, p.scale, unit(), scratch.s + i * kKeys, scratch.dp + i * kKeys);
        });
      }
    }
    for (int64_t i = 0; i < rows; ++i) finish_row(sums[i], first + i);
  }

  // The sums of one row.
  struct RowSums {
    float m = kMinusInfinity;
    double p = 0, weighted = 0;  // sum p, and of ds minus what it should be or of p dp

    void add(const float* p_row, const float* ds_row) {
      for (int64_t j = 0; j < kKeys; ++j) p += p_row[j], weighted += ds_row[j];
    }

    template <bool partial>
    void add_logits(const TileRow& row, float to_logit, float unit, const float* s, const float* dp) {
      Vf x[kVectors], sum{}, product{};
      load_logits<partial>(s, row, to_logit, x);
      const float top = std::max(m, largest_of(x) * unit);
      if (top == kMinusInfinity) return;
      const double alpha = std::exp2(static_cast<double>(m) - top);
      for (int v = 0; v < kVectors; ++v) {
        const Vf e = x[v] == kMinusInfinity ? Vf{} : exp2(x[v] * unit - top);
        sum += e;
        product += x[v] == kMinusInfinity ? Vf{} : e * load(dp + v * kLanes);
      }
      m = top;
      p = alpha * p + reduce_add(sum);
      weighted = alpha * weighted + reduce_add(product);
    }
  };

  // The sink counts as one more key.
  RowSums sums_before_keys(const Sequence& seq, int64_t h, int64_t token) const {
    const int64_t r = row_index(p, seq, h, token);
    if (plan.gproj) return {kMinusInfinity, w.sink ? w.sink[r] : 0.0, -row_sum_of_ds(p, w, seq, h, token)};
    if (!w.sink || w.sink[r] == kMinusInfinity) return {};
    return {w.sink[r], 1.0, 0.0};
  }

  void finish_row(const RowSums& sums, int64_t r) {
    const double ratio = sums.p != 0 ? sums.weighted / sums.p : 0.0;
    if (plan.gproj) {
      const float lambda = w.lambda[r] = static_cast<float>(ratio);
      // A row whose lambda is NaN has a ds of NaN for each key that it sees; keys that it does not see meet 0 here.
      const float factor = std::isnan(lambda) ? 0.f : -lambda;
      for (int64_t c = 0; c < w.k_columns; ++c)
        w.lambda_q[r * w.k_columns + c] = factor == 0.f ? 0.f : factor * w.q[r * w.k_columns + c];
      round_row_to(plan.gproj, 1.f, w.lambda_q + r * w.k_columns, w.k_columns);
    } else if (w.lse[r] == w.lse[r]) {
      w.lse[r] = sums.p != 0 ? static_cast<float>(sums.m + std::log2(sums.p)) : __builtin_inff();
      w.delta[r] += static_cast<float>(ratio);
    }
    if (w.sink && !plan.gproj) w.sink[r] = w.sink[r] == kMinusInfinity ? 0.f : std::exp2(w.sink[r] - w.lse[r]);
  }
};

// Adds to a row of dq what the mean that was taken from k contributes to it.
inline void add_row_sum(float sum, const float* mean, int64_t n, float* dq) {
  if (sum == 0.f) return;
  for (int64_t c = 0; c < n; ++c) dq[c] += sum * mean[c];
}

// Sums over queries, and over the batch where it shares its sinks, in their order; 0 where there are none.
inline void store_dsinks(const Job& job, const GradientOperands& w) {
  const Problem& p = *job.problem;
  if (!p.dsinks.present()) return;
  parallel_for(job.threads, p.dsinks.shape[0] * p.heads, [&](int64_t task, unsigned) {
    const int64_t b = task / p.heads, h = task % p.heads;
    double sum = 0;
    for (int64_t n = 0; n < job.sequence_count; ++n) {
      const Sequence& seq = job.sequences[n];
      if (p.dsinks.shape[0] > 1 && seq.batch != b) continue;
      const int64_t first = row_index(p, seq, h, 0);
      for (int64_t r = first; r < first + seq.q_tokens; ++r)
        if (w.sink[r] != 0.f) sum -= w.sink[r] * (static_cast<double>(w.delta[r]) + (w.lambda ? w.lambda[r] : 0.f));
    }
    *p.dsinks.at<float>(b, h, 0) = static_cast<float>(sum);
  });
}

inline void store_dq(const Problem& p, const BackwardPlan& plan, const Sequence& seq, const Block& block,
                     const GradientOperands& w) {
  const int64_t rows = std::min(seq.q_tokens - block.token, kQueries),
                first = row_index(p, seq, block.head, block.token);
  const bool centred = plan.smooth_k || plan.smooth_k_dq || plan.smooth_blocks;
  const float* mean = w.k_mean + (block.sequence * p.kv_heads + block.head / p.group()) * kMaxDim;
  for (int64_t i = 0; i < rows; ++i) {
    float* dq = w.dq + (first + i) * w.k_columns;
    if (plan.hadamard) rotate_back(dq, p.dim);
    if (centred) add_row_sum(row_sum_of_ds(p, w, seq, block.head, block.token + i), mean, p.dim, dq);
    multiply(dq, p.scale, p.dim);
    store_row(p.dq, seq.batch, block.head, seq.q_first + block.token + i, dq);
  }
}

inline std::size_t backward_scratch_bytes(const GradientOperands& w) {
  WorkspaceAllocator workspace(nullptr);
  BackwardScratch::allocate(w, workspace);
  return workspace.used();
}

inline std::size_t backward_workspace(const Problem& p, unsigned threads) {
  WorkspaceAllocator workspace(nullptr);
  const GradientOperands w = allocate_gradient_operands(p, backward_plan(p), workspace);
  return workspace.used() + threads * backward_scratch_bytes(w);
}

// Everything that the tasks share.
inline void prepare_operands(const Job& job, const BackwardPlan& plan, const GradientOperands& w) {
  const Problem& p = *job.problem;
  const Rounding roundings[] = {plan.q, plan.k, plan.v, plan.do_dp, plan.do_dv};
  bool whole_heads = plan.smooth_k_dq;
  for (const Rounding& r : roundings) whole_heads |= r.group == kWholeHead;
  parallel_for(job.threads, job.sequence_count * p.kv_heads, [&](int64_t side, unsigned) {
    const Sequence& seq = job.sequences[side / p.kv_heads];
    float* mean = w.k_mean + side * kMaxDim;
    const int64_t g = side % p.kv_heads;
    const int64_t first_tile = seq.k_tokens ? first_tile_of(job, side / p.kv_heads) : 0;
    if (w.seen_keys) list_seen_keys(p, seq, g, listed_keys(w, g, first_tile));
    const SeenTokens seen = seen_keys(p, seq, g, first_tile, w);
    const bool smooth = plan.smooth_k || plan.smooth_k_dq;
    if (smooth || plan.smooth_blocks) mean_of_keys(p, seq, g, seen, mean);
    if (whole_heads)
      w.key_heads[side] = head_statistics(
          p.k, p.v, seq.batch, g, seq.k_first, seq.k_tokens, [&](int64_t j) { return seen[j]; },
          smooth ? mean : nullptr);
  });
  if (whole_heads || w.seen_queries)
    parallel_for(job.threads, job.sequence_count * p.heads, [&](int64_t side, unsigned) {
      const Sequence& seq = job.sequences[side / p.heads];
      const int64_t h = side % p.heads;
      for (int64_t i = 0; i < seq.q_tokens && w.seen_queries; ++i)
        w.seen_queries[row_index(p, seq, h, i)] = sees_a_key(p, seq, h, i);
      if (whole_heads)
        w.query_heads[side] = head_statistics(
            p.q, p.do_, seq.batch, h, seq.q_first, seq.q_tokens, [&](int64_t i) { return seen_query(p, seq, h, i, w); },
            nullptr);
    });
  parallel_for(job.threads, job.key_tile_count, [&](int64_t task, unsigned) {
    prepare_keys(p, plan, job.sequences[job.key_tiles[task].sequence], job.key_tiles[task], w);
  });
  parallel_for(job.threads, job.query_block_count, [&](int64_t task, unsigned) {
    prepare_queries(p, plan, job.sequences[job.query_blocks[task].sequence], job.query_blocks[task], w);
  });
}

template <GradientFormat format>
void backward_as(const Job& job, const BackwardPlan& plan) {
  const Problem& p = *job.problem;
  WorkspaceAllocator workspace(job.workspace);
  const GradientOperands w = allocate_gradient_operands(p, plan, workspace);
  const std::size_t scratch_bytes = backward_scratch_bytes(w);
  char* scratch = workspace.take<char>(static_cast<int64_t>(job.threads * scratch_bytes));
  const auto worker = [&](unsigned thread) {
    WorkspaceAllocator own(scratch + thread * scratch_bytes);
    return Backward<format>{p, plan, w, BackwardScratch::allocate(w, own)};
  };
  prepare_operands(job, plan, w);
  if (w.gauge && plan.delta != Delta::from_p)
    parallel_for(job.threads, job.query_block_count, [&](int64_t task, unsigned thread) {
      configure_tiles();
      worker(thread).renew_lse(job.sequences[job.query_blocks[task].sequence], job.query_blocks[task]);
      release_tiles();
    });
  if (plan.delta == Delta::from_p || plan.gproj)
    parallel_for(job.threads, job.query_block_count, [&](int64_t task, unsigned thread) {
      configure_tiles();
      worker(thread).sweep(job.sequences[job.query_blocks[task].sequence], job.query_blocks[task]);
      release_tiles();
    });
  const int64_t tiles_per_task = std::clamp<int64_t>(job.key_tile_count / (8 * job.threads), 1, kTilesPerTask);
  parallel_for(job.threads, job.key_tile_count, [&](int64_t task, unsigned thread) {
    const Block& block = job.key_tiles[task];
    if (block.token / kKeys % tiles_per_task != 0) return;
    configure_tiles();
    worker(thread).run(job.sequences[block.sequence], block, tiles_per_task);
    release_tiles();
  });
  parallel_for(job.threads, job.query_block_count, [&](int64_t task, unsigned) {
    store_dq(p, plan, job.sequences[job.query_blocks[task].sequence], job.query_blocks[task], w);
  });
  store_dsinks(job, w);
}

inline void backward(const Job& job) {
  const BackwardPlan plan = backward_plan(*job.problem);
  switch (plan.format) {
    case GradientFormat::exact:
      return backward_as<GradientFormat::exact>(job, plan);
    case GradientFormat::f16:
      return backward_as<GradientFormat::f16>(job, plan);
    case GradientFormat::bf16:
      return backward_as<GradientFormat::bf16>(job, plan);
    case GradientFormat::e4m3:
      return backward_as<GradientFormat::e4m3>(job, plan);
    case GradientFormat::int8:
      return backward_as<GradientFormat::int8>(job, plan);
    case GradientFormat::migrated:
      return backward_as<GradientFormat::migrated>(job, plan);
  }
}

}  // namespace octet::cpu::OCTET_ISA
