// One tile of keys and one block of queries: s = q k^T and dp = do v^T, and p and ds made of them.
#pragma once
#include "cpu/attention/bwd/scratch.h"
#include "cpu/attention/bwd/tile.h"
#include "cpu/attention/softmax/dropout.h"

namespace octet::cpu::OCTET_ISA {

#ifdef __AMX_BF16__

static_assert(kQueries == kKeys);
constexpr SplitShape kTile{.words = part_words(kKeys), .a_row = split_stride(kKeys), .a_part = part_words(kKeys)};

// `count` rows of up to kMaxDim numbers to rows of A, `stride` words apart, padded with zeros to whole tiles.
inline void split_rows(const float* rows, int64_t count, int64_t columns, int64_t stride, Word* out) {
  alignas(64) float row[kMaxDim] = {};
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(row, rows + i * columns, sizeof(float) * columns);
    split_row(row, padded<Split>(columns), part_words(columns), out + i * stride);
  }
}

// x^T as A, for x [kQueries][kKeys] whose first `rows` rows count.
inline void split_transposed(float* x, int64_t rows, Word* out) {
  alignas(64) float columns[kKeys * kQueries];
  zero(x + rows * kKeys, (kQueries - rows) * kKeys);
  transpose(x, kQueries, kKeys, kKeys, columns);
  for (int64_t j = 0; j < kKeys; ++j) split_row(columns + j * kQueries, kQueries, kTile.a_part, out + j * kTile.a_row);
}

#endif

// A thread's tiles all work on these operands and this scratch memory.
struct BackwardTile {
  const Problem& p;
  const BackwardNumerics& numerics;
  const GradientOperands& w;
  BackwardScratch scratch;

  // The index of a tile of the keys that `block` is one of.
  int64_t tile_index(const Block& block, int64_t tile) const {
    return (block.first_tile + tile) * p.kv_heads + block.head;
  }

  const float* row_biases(int64_t first) const { return w.row_bias ? w.row_bias + first : nullptr; }
  const float* mean_logits(int64_t first) const { return w.mean_logit ? w.mean_logit + first : nullptr; }

  // log2(e) times what turns a result of load_logits into a logit.
  float softmax_scale_log2() const { return p.plain_logits() ? p.scale * kLog2e : kLog2e; }

  // Returns the rows of the next block of queries that the task's tile numbered `own` fetches: all tiles together fetch
  // all of it. A product reads six rows at a time, which hardware does not foresee.
  static Ahead of_next_block(const float* rows, int64_t first, int64_t columns, int64_t own) {
    constexpr int64_t kCount = kQueries / kTilesPerTask;
    return {rows + (first + kQueries + own * kCount) * columns, kCount * columns * static_cast<int64_t>(sizeof(float))};
  }

#ifdef __AMX_BF16__
  static void fetch_next_block(const float* rows, int64_t first, int64_t columns, int64_t own) {
    of_next_block(rows, first, columns, own).fetch(0, 1, 1);
  }

  // The operands made of a block of q and do.
  void split_queries(int64_t first, int64_t rows) {
    const int64_t kc = w.k_columns, vc = w.v_columns;
    split_rows(w.q + first * kc, rows, kc, split_stride(kc), scratch.q);
    split_rows(w.do_dp + first * vc, rows, vc, split_stride(vc), scratch.do_);
    split_columns(w.q_dk + first * kc, rows, kQueries, kc, scratch.q_by_row);
    split_columns(w.do_dv + first * vc, rows, kQueries, vc, scratch.do_by_row);
  }
#else
  void split_queries(int64_t, int64_t) {}
#endif

  void products(int64_t first, int64_t rows, int64_t index, int64_t own) {
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
    if (numerics.smooth_tiles) add_tile_mean(first, rows, index);
  }

  // With dropout: finds what is kept, and makes dp of it that of attention, 0 where dropped.
  void drop_dp(const Sequence& seq, int64_t h, int64_t token, int64_t rows, int64_t tile) const {
    if (!p.dropout) return;
    find_kept(p.dropout_stream(seq, h), p.dropout, token, rows, tile * kKeys, scratch.kept);
    for (int64_t i = 0; i < rows; ++i)
      drop(scratch.kept[i], static_cast<float>(p.dropout_scale()), scratch.dp + i * kKeys);
  }

  // Returns p as dv = p^T do takes it, but for the factor of dropout, which dv gets at the end.
  float* p_of_dv(int64_t rows) const {
    if (!p.dropout) return scratch.s;
    std::memcpy(scratch.p_kept, scratch.s, sizeof(float) * rows * kKeys);
    for (int64_t i = 0; i < rows; ++i) drop(scratch.kept[i], scratch.p_kept + i * kKeys);
    return scratch.p_kept;
  }

  // Adds to the logits what smoothing took from k: q.k = q.k' + q.(tile mean).
  void add_tile_mean(int64_t first, int64_t rows, int64_t index) {
    const int64_t kc = w.k_columns;
    for (int64_t i = 0; i < rows; ++i) {
      const Vf by_row = splat(dot(w.q_raw + (first + i) * kc, w.tile_mean + index * kc));
      float* s = scratch.s + i * kKeys;
      for (int64_t j = 0; j < kKeys; j += kLanes) store(s + j, load(s + j) + by_row);
    }
  }

  float dot(const float* x, const float* y) const {
    Vf sum{};
    for (int64_t c = 0; c < w.k_columns; c += kLanes) sum += load(x + c) * load(y + c);
    return reduce_add(sum);
  }

  // Calls body(row, partial) for the rows of a block and a tile.
  template <class Body>
  OCTET_INLINE_MEMBER void for_tile_rows(const Sequence& seq, int64_t h, int64_t token, int64_t rows, int64_t tile,
                                         const Body& body) const {
    const int64_t first = row_index(p, seq, h, token);
    for_rows(p, seq, h, token, rows, tile * kKeys, row_biases(first), mean_logits(first), body);
  }

  // From logits and dp to p and ds; `apply_cap`: ds with the derivative of the softcap.
  template <GradientFormat format>
  void gradient_tile(const Sequence& seq, int64_t h, int64_t token, int64_t rows, int64_t tile, bool apply_cap = true) {
    const int64_t first = row_index(p, seq, h, token);
    for_tile_rows(seq, h, token, rows, tile, [&](int64_t i, const TileRow& keys, auto partial) {
      const GradientRow row{keys,
                            p.scale,
                            softmax_scale_log2(),
                            w.lse[first + i],
                            w.delta[first + i],
                            numerics.smooth_k_dq ? 0x1p15f : 1.f,
                            numerics.smooth_k_dq,
                            apply_cap,
                            scratch.derivative + i * kKeys,
                            scratch.ds_sum + i,
                            scratch.bias_ds ? scratch.bias_ds + i * kKeys : nullptr};
      gradient_row<format, partial>(row, scratch.s + i * kKeys, scratch.dp + i * kKeys);
    });
  }
};

}  // namespace octet::cpu::OCTET_ISA
