// Backward attention (FlashAttention-2, arXiv 2307.08691, Algorithm 2), recomputing p from lse.
//
// A task owns a few tiles of kKeys keys of one head of k and v. For each tile and each block of queries that sees it,
// over all heads of q in the group:
//   s = q k^T,  dp = do v^T          matmul; dp is 0 where dropout drops an element
//   p = exp(s - lse),  ds = p (dp - delta), both rounded
//   dv += p^T do,  dk += ds^T q      into the task's own memory; p without dropped elements
//   dq += ds k                       shared by all tiles of a head
//   dmask += ds                      un-rounded, see dmask.h
// and at the end dk *= scale; after all tasks dq *= scale. `delta` is that of attention minus dlse, and lse has the
// sink in it, so that neither is seen here. The tiles add to dq in ascending order: each block of queries has a number
// in memory that says whose turn it is, so the bits of dq do not depend on the number of threads. Tasks start in
// ascending order of tiles, so a task only ever waits for tasks that have started.
//
// All arithmetic is in f32; formats are imposed on the operands, which keeps every product of two of them exact.
#pragma once
#include "cpu/attention/bwd/products.h"

namespace octet::cpu::OCTET_ISA {

template <GradientFormat format>
struct Backward : BackwardTile {
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
    products(first, rows, index, own);
    drop_dp(seq, h, token, rows, tile);
    gradient_tile<format>(seq, h, token, rows, tile);
    round_tiles(rows);
#ifdef __AMX_BF16__
    split_transposed(p_of_dv(rows), rows, scratch.p_t);
    split_transposed(scratch.dp, rows, scratch.ds_t);
#else
    matmul<F32, true>(p_of_dv(rows), columnwise, w.do_dv + first * vc, vc, dv, vc, kKeys, vc, rows);
    matmul<F32, true>(scratch.dp, columnwise, w.q_dk + first * kc, kc, dk, kc, kKeys, kc, rows,
                      of_next_block(w.dq, first, kc, own));
#endif
    if (numerics.gproj) {
      if (p.softcap != 0.f) cap_p(rows);
      matmul<F32, true>(scratch.s, columnwise, w.lambda_q + first * kc, kc, dk, kc, kKeys, kc, rows);
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < kKeys; ++j) scratch.dp[i * kKeys + j] -= w.lambda[first + i] * scratch.s[i * kKeys + j];
    }
#ifdef __AMX_BF16__
    for (int64_t i = 0; i < rows; ++i)
      split_row(scratch.dp + i * kKeys, kKeys, kTile.a_part, scratch.ds + i * kTile.a_row);
    fetch_next_block(w.dq, first, kc, own);
    split_matmul<true>(kTile, scratch.p_t, scratch.do_by_row, dv, vc, kKeys, vc);
    split_matmul<true>(kTile, scratch.ds_t, scratch.q_by_row, dk, kc, kKeys, kc);
#endif
    w.dmask.add_tile(p, seq, h, token, rows, tile, scratch.bias_ds);
    int32_t* turn = w.turn + first;
    wait_for_turn(turn, static_cast<int32_t>(tile));
    const Word* k = w.k_by_row + index * words_of<Split>(kKeys) * kc;
#ifdef __AMX_BF16__
    add_ds_k(rows, k, dq);
#else
    const int64_t keys = std::min(seq.k_tokens - tile * kKeys, kKeys);
    for (int64_t c = 0, width; c < kc; c += width) {
      width = std::min(kPanelColumns, kc - c);
      matmul<F32, true>(scratch.dp, Strides{kKeys, 1}, k + kKeys * c, width, dq + c, kc, rows, width, keys);
    }
#endif
    for (int64_t i = 0; i < rows && w.ds_sum; ++i) w.ds_sum[first + i] += scratch.ds_sum[i];
    w.dmask.add_rows(p, first, rows, scratch.bias_ds);
    end_turn(turn, static_cast<int32_t>(tile));
  }

#ifdef __AMX_BF16__
  // dq += ds k
  void add_ds_k(int64_t rows, const Word* k, float* dq) {
    const int64_t kc = w.k_columns;
    if (rows == kQueries) return split_matmul<true>(kTile, scratch.ds, k, dq, kc, rows, kc);
    split_matmul<false>(kTile, scratch.ds, k, scratch.product, kc, rows, kc);
    for (int64_t i = 0; i < rows * kc; i += kLanes) store(dq + i, load(dq + i) + load(scratch.product + i));
  }
#endif

  // P as GProj meets it: times the derivative of the softcap.
  void cap_p(int64_t rows) {
    for (int64_t j = 0; j < rows * kKeys; j += kLanes) {
      const Vf p = load(scratch.s + j);
      store(scratch.s + j, p == Vf{} ? p : round_p<format>(p * load(scratch.derivative + j), 1.f));
    }
  }

  // Rounding that needs a whole tile.
  void round_tiles(int64_t rows) {
    if constexpr (format == GradientFormat::e4m3) round_tile<OCTET_E4M3>(scratch.dp, rows);
    if constexpr (format == GradientFormat::int8) {
      round_tile<OCTET_I8>(scratch.s, rows);
      round_tile<OCTET_I8>(scratch.dp, rows);
    }
  }

  void store_gradients(const Sequence& seq, const Block& block, int64_t keys) {
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = seq.k_first + block.token + j;
      multiply(scratch.dk + j * w.k_columns, p.scale, p.dim);
      if (p.dropout) multiply(scratch.dv + j * w.v_columns, static_cast<float>(p.dropout_scale()), p.dim_v);
      store_row(p.dk, seq.batch, block.head, at, scratch.dk + j * w.k_columns);
      store_row(p.dv, seq.batch, block.head, at, scratch.dv + j * w.v_columns);
    }
  }
};

}  // namespace octet::cpu::OCTET_ISA
