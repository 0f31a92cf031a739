// Forward attention: online softmax (FlashAttention-2, arXiv 2307.08691, Algorithm 1) over steps of a few key
// tiles.
//
// A task owns a block of queries of one head. For each step:
//   s = q k^T                        matmul, int32 or float
//   m' = max(m, rowmax(s)),  p = exp(s - m'),  alpha = exp(m - m')
//   l = alpha l + rowsum(p)
//   o = alpha o + p v                matmul; 8-bit P: through int32, with a scale per row; p without dropped elements
// and at the end o / l, lse = m + ln l. The maximum is subtracted before scaling, so the largest p is exactly 1.
//
// A step is long because what is done once per row and step (maximum, alpha, o in and out of registers) is overhead,
// and because tile instructions start slowly after half a microsecond without any.
#pragma once
#include "cpu/attention/fwd/accumulate.h"
#include "cpu/attention/fwd/epilogue.h"
#include "cpu/attention/fwd/f16_softmax.h"
#include "cpu/attention/softmax/dropout.h"

namespace octet::cpu::OCTET_ISA {

template <class Qk, class Pv, PFormat format>
struct Forward {
  using Scratch = ForwardScratch<Qk, Pv>;
  static constexpr int64_t kRows = Scratch::kRows;

  const Problem& p;
  const ForwardNumerics& numerics;
  const KeySide& side;
  const Signs& signs;
  Scratch scratch;
  QueryRows queries;
  RowState<kRows> state;

  // `next`: the block that this thread is likely to get after this one.
  void run(const Sequence& seq, const Block& block, const Block& next) {
    const int64_t h = block.head, token = block.token, g = h / p.group();
    const int64_t rows = std::min(seq.q_tokens - token, kRows);
    const int64_t side_index = block.sequence * p.kv_heads + g;
    start(seq, h, token, rows, side_index);
    prefetch(seq, block, rows, next);
    const KeyRange keys = p.keys_of_block(token, rows, seq.q_tokens, seq.k_tokens);
    const int64_t last = (keys.last + kKeys - 1) / kKeys;
    // Steps lie at multiples of their length, but for the first; scales of P do not depend on what else a block sees.
    const auto tiles_from = [&](int64_t tile) {
      return std::min(last - tile, numerics.step_tiles - tile % numerics.step_tiles);
    };
    const int64_t first = keys.first < keys.last ? keys.first / kKeys / 2 * 2 : last;
    const int64_t index = side.tile_index(g, block.first_tile);
    if constexpr (sums_in_units(format))
      state.unit = unit_of_p(v_finite(side, index + first, last - first), numerics.p_top);
    else
      state.unit = 1.f;
    if (kLogitsAhead<Pv> && first < last) logits(index + first, tiles_from(first), rows);
    for (int64_t tile = first, tiles; tile < last; tile += tiles) {
      tiles = tiles_from(tile);
      if (!kLogitsAhead<Pv>) logits(index + tile, tiles, rows);
      softmax_rows(seq, h, token, rows, tile, tiles, index + tile);
      if (p.dropout) drop_p(seq, h, token, rows, tile, tiles);
      accumulate<format>(scratch, side, state, index + tile, tiles, rows);
#ifdef __AMX_BF16__
      if constexpr (kSplits<Pv>)
        if (!v_finite(side, index + tile, tiles))
          add_what_does_not_split(p, scratch, side, seq, g, tile * kKeys, tiles * kKeys, rows);
#endif
      if (kLogitsAhead<Pv> && tile + tiles < last) logits(index + tile + tiles, tiles_from(tile + tiles), rows);
    }
    store_rows<format>(p, numerics, side, seq, h, token, rows, side_index, queries, state, scratch.o);
  }

  void start(const Sequence& seq, int64_t h, int64_t token, int64_t rows, int64_t side_index) {
    const float* k_mean = side.k_mean && (p.lse.present() || p.sinks.present() || p.softcap != 0.f)
                              ? side.k_mean + side_index * kMaxDim
                              : nullptr;
    pack_queries<Qk>(p, numerics, seq, h, token, rows, kRows, signs, k_mean, scratch.q, side.k_words + Scratch::kQPad,
                     side.k_words, queries);
    for (int64_t i = 0; i < kRows; ++i) {
      const float scale = queries.scale[i];
      if (scale != scale && !sees_a_key(p, seq, h, token + i)) queries.scale[i] = 1.f;  // NaN would reach its row
      state.m[i] = state.top[i] = kMinusInfinity;
      state.to_logit[i] = kept_from_zero(static_cast<double>(queries.scale[i]) * p.scale);
      state.softmax_scale_log2[i] =
          p.plain_logits() ? kept_from_zero(static_cast<double>(queries.scale[i]) * p.scale * kLog2e) : kLog2e;
      state.row_bias[i] = i >= rows                  ? 0.f
                          : i > 0 && one_mask_row(p) ? state.row_bias[0]
                                                     : row_bias_of(p, seq, h, token + i);
    }
    std::memset(state.l, 0, sizeof state.l);
    std::memset(scratch.o, 0, sizeof(float) * kRows * side.v_columns);
  }

  // Fetches the rows of o, and of q for the next block, while the products keep this thread busy.
  void prefetch(const Sequence& seq, const Block& block, int64_t rows, const Block& next) const {
    prefetch_rows<true>(p.o, seq.batch, block.head, seq.q_first + block.token, rows);
    if (next.sequence == block.sequence)
      prefetch_rows<false>(p.q, seq.batch, next.head, seq.q_first + next.token,
                           std::min(seq.q_tokens - next.token, kRows));
  }

  // q k^T.
  void logits(int64_t index, int64_t tiles, int64_t rows) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const Word* k = side.k + (index + tile) * side.k_stride;
#ifdef __AMX_BF16__
      if constexpr (kSplits<Qk>) {
        const int64_t words = side.k_words / kParts;
        const SplitShape shape{.words = words, .a_row = side.k_words + Scratch::kQPad, .a_part = words};
        split_matmul<false>(shape, scratch.q, k, scratch.s + tile * kKeys, scratch.stride, rows, kKeys);
        continue;
      }
#endif
      matmul<Qk, false>(scratch.q, {side.k_words, 1}, k, kKeys, scratch.s + tile * kKeys, scratch.stride, rows, kKeys,
                        side.k_words, following(k, side.k_stride));
      if (side.k_zero) subtract_zero_points(index + tile, rows, scratch.s + tile * kKeys);
    }
  }

  // sum (a - z)(b - y) = sum a b - z sum b - y sum (a - z) for the codes a of q and b of k and their zero points z and
  // y.
  void subtract_zero_points(int64_t index, int64_t rows, typename Qk::Sum* s) {
    const int32_t *k_zero = side.k_zero + index * kKeys, *k_sum = side.k_sum + index * kKeys;
    for (int64_t i = 0; i < rows; ++i, s += scratch.stride)
      for (int64_t j = 0; j < kKeys; ++j)
        s[j] -= static_cast<typename Qk::Sum>(queries.zero[i] * k_sum[j] + k_zero[j] * queries.sum[i]);
  }

  // From logits to P.
  void softmax_rows(const Sequence& seq, int64_t h, int64_t token, int64_t rows, int64_t tile, int64_t tiles,
                    int64_t index) {
    const int64_t key = tile * kKeys, keys = tiles * kKeys;
    TileRow row{side.k_scale ? side.k_scale + index * kKeys : nullptr,
                side.k_correction ? side.k_correction + index * kKeys : nullptr,
                0,
                static_cast<int>(keys),
                nullptr,
                p.mask.dtype,
                p.mask.stride[3],
                0.f};
    const float* v_scale = side.v_scale ? side.v_scale + index * kKeys : nullptr;
    const bool v_finite = OCTET_ISA::v_finite(side, index, tiles);
    const bool all_seen = p.plain_logits() && p.keys_of(token + rows - 1, seq.q_tokens, seq.k_tokens).first <= key &&
                          p.keys_of(token, seq.q_tokens, seq.k_tokens).last >= key + keys;
    const bool stale_max = all_seen && !numerics.beta && v_finite && state.unit == 1.f;
#ifdef __AVX512FP16__
    constexpr bool kF16Softmax = format == PFormat::u8;
    F16Step f16;
    if constexpr (kF16Softmax) f16 = f16_step(row.k_scale, v_scale, tiles);
#else
    constexpr bool kF16Softmax = false;
#endif
    const auto row_at = [&](int64_t i) {
      if (all_seen) return row;
      TileRow own = row;
      const KeyRange seen = p.keys_of(token + i, seq.q_tokens, seq.k_tokens);
      own.first = static_cast<int>(std::max<int64_t>(seen.first - key, 0));
      own.last = static_cast<int>(std::min(seen.last - key, keys));
      if (p.plain_logits()) return own;
      if (p.mask.present()) own.mask = mask_row(p, seq.batch, h, token + i, key);
      own.row_bias = state.row_bias[i];
      own.terms = terms_of(p, seq, h, token + i, key, numerics.smooth_k ? queries.mean_logit[i] : 0.0);
      return own;
    };
    for (int64_t first = 0; first < rows; first += kLanes) {
      const int64_t last = std::min(first + kLanes, rows);
      bool done[kLanes] = {};
#ifdef __AVX512FP16__
      if constexpr (kF16Softmax) {
        if (p.plain_logits())
          softmax_f16<Qk>(f16, scratch.s_row(first), scratch.stride, row_at, all_seen, tiles, numerics.p_top, first,
                          last, state, scratch.p_row(first), done);
      }
#endif
      alignas(64) float tops[kLanes];
      store(tops, splat(kMinusInfinity));
      for (int64_t i = first; i < last; ++i) {
        if (done[i - first]) continue;
        const TileRow own = row_at(i);
        if constexpr (may_keep_stale_max(format) && !kF16Softmax) {
          done[i - first] = stale_max && state.m[i] != kMinusInfinity &&
                            p_of_row_stale_max<Qk, Pv, format>(numerics, scratch.s_row(i), own, tiles, v_scale, i,
                                                               state, scratch.p_row(i));
          if (done[i - first]) continue;
        }
        float& top = tops[i - first];
        top = logits_row<Qk>(scratch.s_row(i), own, tiles, state.to_logit[i]);
        if (numerics.beta) top = shifted_top(i, top, keys);
      }
      update_max<exp2_degree(format)>(tops, first, state);
      for (int64_t i = first; i < last; ++i)
        if (!done[i - first])
          p_of_row<Pv, format>(numerics, scratch.logits_row(i), tiles, v_scale, v_finite, i, state, scratch.p_row(i));
    }
  }

  // Takes the elements that dropout drops from P of a step; l, which the softmax has summed, keeps them.
  __attribute__((noinline)) void drop_p(const Sequence& seq, int64_t h, int64_t token, int64_t rows, int64_t tile,
                                        int64_t tiles) {
    const DropoutStream stream = p.dropout_stream(seq, h);
    uint64_t kept[kMaxBlockRows];
    for (int64_t t = 0; t < tiles; ++t) {
      find_kept(stream, p.dropout, token, rows, (tile + t) * kKeys, kept);
      for (int64_t i = 0; i < rows; ++i) drop(kept[i], scratch.p_row(i) + t * kKeys);
    }
  }

  // Bias correction beta.
  float shifted_top(int64_t i, float top, int64_t keys) {
    const float earlier = state.top[i];
    state.top[i] = std::max(top, earlier);
    return shifted_maximum(scratch.logits_row(i), keys, top, earlier, p.beta,
                           numerics.beta_limit * kLog2e / state.softmax_scale_log2[i]);
  }
};

}  // namespace octet::cpu::OCTET_ISA
