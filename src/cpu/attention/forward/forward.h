// Forward attention: online softmax (FlashAttention-2, arXiv 2307.08691, Algorithm 1) over steps of a few key
// tiles.
//
// A task owns a block of queries of one head. For each step:
//   s = q k^T                        matmul, int32 or float
//   m' = max(m, rowmax(s)),  p = exp(s - m'),  alpha = exp(m - m')
//   l = alpha l + rowsum(p)
//   o = alpha o + p v                matmul; 8-bit P: through int32, with a scale per row
// and at the end o / l, lse = m + ln l. The maximum is subtracted before scaling, so the largest p is exactly 1.
//
// A step is long because what is done once per row and step (maximum, alpha, o in and out of registers) is overhead,
// and because tile instructions start slowly after half a microsecond without any.
#pragma once
#include <cmath>

#include "cpu/attention/forward/accumulate_8bit.h"
#include "cpu/attention/forward/halves.h"
#include "cpu/parallel.h"
#include "cpu/sinks.h"

namespace octet::cpu::OCTET_ISA {

// True where the product of P with V is formed apart, for a part of a step at a time, and then added to o. 8-bit P is
// an integer, and each part has a scale of its own. f16 P is the one that gradients build on: next to a large sum small
// weights would be lost one by one, always downwards; a few at a time they are not (coherence of the error of delta on
// tied maxima: 0.91, by tiles 0.13, by quarters of a tile below 0.1).
constexpr bool through_strip(PFormat format) { return format == PFormat::u8 || format == PFormat::f16; }
constexpr int64_t kF16Part = 16;  // keys

// Tiles of v that meet P at a time: two of a panel of floats fill two thirds of the first cache.
template <class Pv>
constexpr int64_t kTilesAtOnce = std::is_same_v<Pv, F32> ? 2 : kMaxStepKeys / kKeys;

// Rows of a block of queries: a multiple of the rows that the inner loops of the engines take at a time (tiles 32,
// vectors 6), as many as keep q, s and o in the second cache. Words of f32 fill that with k and v alone, which many
// rows read less often.
template <class Qk, class Pv>
constexpr int64_t kBlockRows = std::is_same_v<Qk, F32> || kSplits<Qk> ? 192
                               : Qk::kTiles&& Pv::kTiles              ? 64
                                                                      : 96;

// True where the logits of the next step are found before P V of this one, so that tiles start once for both; P then
// does not lie in the place of its logits.
template <class Pv>
constexpr bool kLogitsAhead = Pv::kTiles&& std::is_same_v<typename Pv::Element, uint8_t>;

// Scratch memory of one thread. A row of P takes the place of the logits it comes from.
template <class Qk, class Pv>
struct ForwardScratch {
  static constexpr int64_t kRows = kBlockRows<Qk, Pv>;
  static constexpr int64_t kQPad = kSplits<Qk> ? 16 : 0;  // words: rows a power of two apart share cache sets
  static constexpr int64_t kPWords = kSplits<Pv> ? words_of<Pv>(kMaxStepKeys) + 16 : kMaxStepKeys / Pv::kPerWord;

  int64_t stride;           // of s: rows a power of two apart would compete for cache sets
  Word* q;                  // [kRows][k_words + kQPad]
  typename Qk::Sum* s;      // [kRows][stride]
  Word* p;                  // [kRows][kPWords], where P has a place of its own
  typename Pv::Sum* strip;  // [parts][kRows][kStripColumns] of P V, if it goes that way
  float* o;                 // [kRows][v_columns]

  static ForwardScratch allocate(const ForwardPlan& plan, const KeySide& side, WorkspaceAllocator& workspace) {
    ForwardScratch t;
    t.stride = plan.step_tiles * kKeys + 16;
    t.s = workspace.take<typename Qk::Sum>(kRows * t.stride);
    t.q = workspace.take<Word>(kRows * (side.k_words + kQPad));
    t.o = workspace.take<float>(kRows * side.v_columns);
    t.p = kLogitsAhead<Pv> || kSplits<Pv> ? workspace.take<Word>(kRows * kPWords) : nullptr;
    const int64_t parts = plan.p == PFormat::u8 ? kStepTiles : 1;
    const bool strip = through_strip(plan.p) && !kLogitsAhead<Pv>;
    t.strip = strip ? workspace.take<typename Pv::Sum>(parts * kRows * kStripColumns) : nullptr;
    return t;
  }

  typename Qk::Sum* s_row(int64_t i) const { return s + i * stride; }
  float* logits_row(int64_t i) const { return reinterpret_cast<float*>(s_row(i)); }
  typename Pv::Element* p_row(int64_t i) const {
    return reinterpret_cast<typename Pv::Element*>(p_words() + i * p_stride());
  }
  // Where P lies.
  Word* p_words() const { return kLogitsAhead<Pv> ? p : reinterpret_cast<Word*>(s); }
  int64_t p_stride() const { return kLogitsAhead<Pv> ? kPWords : stride; }
};

// o = alpha o + product, for one row.
OCTET_INLINE void add_product(float* o, const float* product, float alpha, int64_t columns) {
  for (int64_t c = 0; c < columns; c += kLanes) store(o + c, load(o + c) * alpha + load(product + c));
}

template <class Qk, class Pv, PFormat format>
struct Forward {
  using Scratch = ForwardScratch<Qk, Pv>;
  static constexpr int64_t kRows = Scratch::kRows;

  const Problem& p;
  const ForwardPlan& plan;
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
      return std::min(last - tile, plan.step_tiles - tile % plan.step_tiles);
    };
    const int64_t first = keys.first < keys.last ? keys.first / kKeys / 2 * 2 : last;
    const int64_t index = side.tile_index(g, block.first_tile);
    if (kLogitsAhead<Pv> && first < last) logits(index + first, tiles_from(first), rows);
    for (int64_t tile = first, tiles; tile < last; tile += tiles) {
      tiles = tiles_from(tile);
      if (!kLogitsAhead<Pv>) logits(index + tile, tiles, rows);
      softmax_rows(seq, h, token, rows, tile, tiles, index + tile);
      accumulate(index + tile, tiles, rows);
#ifdef __AMX_BF16__
      if constexpr (kSplits<Pv>)
        if (!v_finite(index + tile, tiles)) add_what_does_not_split(seq, g, tile * kKeys, tiles * kKeys, rows);
#endif
      if (kLogitsAhead<Pv> && tile + tiles < last) logits(index + tile + tiles, tiles_from(tile + tiles), rows);
    }
    finish(seq, h, token, rows, side_index);
  }

  void start(const Sequence& seq, int64_t h, int64_t token, int64_t rows, int64_t side_index) {
    const float* k_mean =
        side.k_mean && (p.lse.present() || p.sinks.present()) ? side.k_mean + side_index * kMaxDim : nullptr;
    pack_queries<Qk>(p, plan, seq, h, token, rows, kRows, signs, k_mean, scratch.q, side.k_words + Scratch::kQPad,
                     side.k_words, queries);
    for (int64_t i = 0; i < kRows; ++i) {
      const float step = queries.step[i];
      if (step != step && !sees_a_key(p, seq, h, token + i)) queries.step[i] = 1.f;  // NaN would reach its row
      state.m[i] = state.top[i] = kMinusInfinity;
      state.to_logit[i] = kept_from_zero(static_cast<double>(queries.step[i]) * p.scale);
      state.unit[i] =
          p.mask.present() ? kLog2e : kept_from_zero(static_cast<double>(queries.step[i]) * p.scale * kLog2e);
      state.gauge[i] = i >= rows ? 0.f : i > 0 && one_mask_row(p) ? state.gauge[0] : mask_gauge(p, seq, h, token + i);
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
    }
  }

  // The tiles of k, and those of a panel of v, lie in the order that they are wanted in.
  static Ahead following(const Word* tile, int64_t words) {
    return {tile + words, words * static_cast<int64_t>(sizeof(Word))};
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
    const bool v_finite = this->v_finite(index, tiles);
    const bool all_seen = !p.mask.present() && p.keys_of(token + rows - 1, seq.q_tokens, seq.k_tokens).first <= key &&
                          p.keys_of(token, seq.q_tokens, seq.k_tokens).last >= key + keys;
    const bool lazy = all_seen && !plan.beta && v_finite;
#ifdef __AVX512FP16__
    constexpr bool kHalves = format == PFormat::u8;
    HalfStep half;
    if constexpr (kHalves) half = half_step(row.k_scale, v_scale, tiles);
#else
    constexpr bool kHalves = false;
#endif
    const auto row_at = [&](int64_t i) {
      if (all_seen) return row;
      TileRow own = row;
      const KeyRange seen = p.keys_of(token + i, seq.q_tokens, seq.k_tokens);
      own.first = static_cast<int>(std::max<int64_t>(seen.first - key, 0));
      own.last = static_cast<int>(std::min(seen.last - key, keys));
      if (p.mask.present()) own.mask = mask_row(p, seq.batch, h, token + i, key), own.gauge = state.gauge[i];
      return own;
    };
    for (int64_t first = 0; first < rows; first += kLanes) {
      const int64_t last = std::min(first + kLanes, rows);
      bool done[kLanes] = {};
#ifdef __AVX512FP16__
      if constexpr (kHalves) {
        if (!p.mask.present())
          weights_in_halves<Qk>(half, scratch.s_row(first), scratch.stride, row_at, all_seen, tiles, plan.p_top, first,
                                last, state, scratch.p_row(first), done);
      }
#endif
      alignas(64) float tops[kLanes];
      store(tops, splat(kMinusInfinity));
      for (int64_t i = first; i < last; ++i) {
        if (done[i - first]) continue;
        const TileRow own = row_at(i);
        if constexpr (may_be_lazy(format) && !kHalves) {
          done[i - first] = lazy && state.m[i] != kMinusInfinity &&
                            weights_row_lazily<Qk, Pv, format>(plan, scratch.s_row(i), own, tiles, v_scale, i, state,
                                                               scratch.p_row(i));
          if (done[i - first]) continue;
        }
        float& top = tops[i - first];
        top = logits_row<Qk>(scratch.s_row(i), own, tiles, state.to_logit[i]);
        if (plan.beta) top = shifted_top(i, top, keys);
      }
      raise_maxima<exp2_degree(format)>(tops, first, state);
      for (int64_t i = first; i < last; ++i)
        if (!done[i - first])
          weights_row<Pv, format>(plan, scratch.logits_row(i), tiles, v_scale, v_finite, i, state, scratch.p_row(i));
    }
  }

  // Bias correction beta.
  float shifted_top(int64_t i, float top, int64_t keys) {
    const float earlier = state.top[i];
    state.top[i] = std::max(top, earlier);
    return shifted_maximum(scratch.logits_row(i), keys, top, earlier, p.beta, plan.beta_reach * kLog2e / state.unit[i]);
  }

  bool v_finite(int64_t index, int64_t tiles) const {
    return std::all_of(side.v_finite + index, side.v_finite + index + tiles, [](bool finite) { return finite; });
  }

  // o = alpha o + P V.
  void accumulate(int64_t index, int64_t tiles, int64_t rows) {
    const int64_t columns = side.v_columns;
#ifdef __AMX_BF16__
    if constexpr (kSplits<Pv>) return accumulate_split(index, tiles, rows);
#endif
    if constexpr (format == PFormat::u8) {
      accumulate_codes<Pv>({scratch.p_words(), scratch.p_stride(), side.v + index * side.v_stride, side.v_stride,
                            side.v_words, tiles, columns},
                           rows, state.alpha, state.p_step, scratch.strip, scratch.o);
    } else if constexpr (format == PFormat::f16) {
      for (int64_t first = 0; first < columns; first += kStripColumns)
        accumulate_f16(index, tiles, rows, first, std::min(columns - first, kStripColumns));
    } else {
      for (int64_t i = 0; i < rows; ++i)
        if (state.alpha[i] != 1.f) scale_row(scratch.o + i * columns, state.alpha[i], columns);
      const Strides strides{scratch.stride, 1};
      const bool finite = v_finite(index, tiles);
      for (int64_t c = 0; c < columns; c += side.v_panel)
        for (int64_t tile = 0, count; tile < tiles; tile += count) {
          count = finite ? std::min(kTilesAtOnce<Pv>, tiles - tile) : 1;
          const int64_t width = side.panel_width(c), words = count * side.v_words;
          const Word *own_p = scratch.p_words() + tile * side.v_words, *v = side.v_at(index + tile, c);
          if (finite)
            matmul<Pv, true>(own_p, strides, v, width, scratch.o + c, columns, rows, width, words,
                             following(v, words * width));
          else
            matmul_skipping_zeros<Pv>(own_p, strides, v, width, scratch.o + c, columns, rows, width, words);
        }
    }
  }

#ifdef __AMX_BF16__
  // The same for float32 in tiles.
  void accumulate_split(int64_t index, int64_t tiles, int64_t rows) {
    const int64_t columns = side.v_columns, words = part_words(kKeys);
    for (int64_t i = 0; i < rows; ++i) {
      split_row(scratch.logits_row(i), tiles * kKeys, tiles * words, scratch.p + i * Scratch::kPWords);
      if (state.alpha[i] != 1.f) scale_row(scratch.o + i * columns, state.alpha[i], columns);
    }
    constexpr int64_t kPieces = 2;  // of a panel of v, in the first cache
    SplitShape shape{
        .words = words, .a_row = Scratch::kPWords, .a_part = tiles * words, .a_piece = words, .b_piece = side.v_stride};
    for (int64_t first = 0; first < tiles; first += kPieces) {
      shape.pieces = std::min(kPieces, tiles - first);
      const Word* v = side.v + (index + first) * side.v_stride;
      split_matmul<true>(shape, scratch.p + first * words, v, scratch.o, columns, rows, columns);
    }
  }

  // Products with numbers of v that are too large for bf16 or not finite, which zeros of P skip.
  void add_what_does_not_split(const Sequence& seq, int64_t g, int64_t key, int64_t keys, int64_t rows) {
    alignas(64) float v[kMaxDim];
    for (int64_t j = 0; j < std::min(keys, seq.k_tokens - key); ++j) {
      load_numbers(p.v, seq.batch, g, seq.k_first + key + j, 1, 1, side.v_columns, v);
      for (int64_t c = 0; c < p.dim_v; ++c)
        for (int64_t i = 0; i < rows && !splits(v[c]); ++i)
          if (const float weight = scratch.logits_row(i)[j]; weight != 0.f)
            scratch.o[i * side.v_columns + c] += weight * v[c];
    }
  }
#endif

  // The same for n columns of f16 P: a few keys at a time.
  void accumulate_f16(int64_t index, int64_t tiles, int64_t rows, int64_t first, int64_t n) {
    constexpr int64_t kWords = kF16Part / Pv::kPerWord;
    const int64_t columns = side.v_columns;
    const Strides strides{scratch.stride, 1};
    for (int64_t word = 0; word < tiles * side.v_words; word += kWords) {
      const Word *p_part = scratch.p_words() + word, *v = side.v + index * side.v_stride + word * columns + first;
      if (side.v_finite[index + word / side.v_words]) {
        matmul<Pv, false>(p_part, strides, v, columns, scratch.strip, kStripColumns, rows, n, kWords);
      } else {
        std::memset(scratch.strip, 0, sizeof *scratch.strip * rows * kStripColumns);
        matmul_skipping_zeros<Pv>(p_part, strides, v, columns, scratch.strip, kStripColumns, rows, n, kWords);
      }
      for (int64_t i = 0; i < rows; ++i)
        add_product(scratch.o + i * columns + first, scratch.strip + i * kStripColumns, word ? 1.f : state.alpha[i], n);
    }
  }

  void finish(const Sequence& seq, int64_t h, int64_t token, int64_t rows, int64_t side_index) {
    const int64_t columns = side.v_columns;
    float residual[kMaxDim];
    const float sink = sink_of(p, seq.batch, h);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = seq.q_first + token + i;
      float* o = scratch.o + i * columns;
      const float l = reduce_add(load(state.l[i]));
      const bool seen = l != 0.f;
      const float inverse = seen ? 1.f / l : 0.f;
      for (int64_t c = 0; c < columns; ++c) o[c] = seen ? o[c] * inverse : 0.f;
      if (side.v_channel)
        for (int64_t c = 0; c < p.dim_v; ++c)
          o[c] *= step_of(side.v_channel[side_index * kMaxDim + c], largest_code(plan.v)).step;
      if (const float unit = side.v_unit ? side.v_unit[side_index] : 1.f; unit != 1.f)
        for (int64_t c = 0; c < p.dim_v; ++c) o[c] *= unit;
      if (plan.smooth_v && seen)
        for (int64_t c = 0; c < p.dim_v; ++c) o[c] += side.v_mean[side_index * kMaxDim + c];
      if (p.lse.present() || sink != kMinusInfinity) {
        const double of_keys = seen ? lse_of_keys(i, l) : kMinusInfinity, lse = with_sink(of_keys, sink);
        if (sink != kMinusInfinity) scale_row(o, static_cast<float>(weight_of(of_keys, lse)), columns);
        if (p.lse.present()) *p.lse.at<float>(seq.batch, h, at) = static_cast<float>(lse);
      }
      store_row(p.o, seq.batch, h, at, o);
      if (p.o_residual.present()) {
        std::memcpy(residual, o, sizeof(float) * p.dim_v);
        round_row(p.o.dtype, residual, p.dim_v);
        for (int64_t c = 0; c < p.dim_v; ++c) residual[c] = o[c] - residual[c];
        store_row(p.o_residual, seq.batch, h, at, residual);
      }
    }
  }

  // Returns lse of the keys alone, for the caller's k: smoothing moved every logit of the row by scale q.mean.
  double lse_of_keys(int64_t i, float l) const {
    const double unit = static_cast<double>(state.unit[i]) / 1.44269504088896340736;
    const double value = state.m[i] * unit + std::log(static_cast<double>(l) / (scales_p(format) ? plan.p_top : 1.f));
    return state.gauge[i] + (plan.smooth_k ? value + p.scale * queries.mean_logit[i] : value);
  }
};

// Bytes of scratch memory of one thread.
template <class Qk, class Pv, PFormat format>
std::size_t forward_scratch_bytes(const ForwardPlan& plan, const KeySide& side) {
  WorkspaceAllocator workspace(nullptr);
  ForwardScratch<Qk, Pv>::allocate(plan, side, workspace);
  return workspace.used();
}

template <class Qk, class Pv, PFormat format>
std::size_t forward_workspace_as(const Problem& p, const ForwardPlan& plan, unsigned threads) {
  WorkspaceAllocator workspace(nullptr);
  const KeySide side = allocate_key_side<Qk, Pv>(p, plan, workspace);
  return workspace.used() + threads * forward_scratch_bytes<Qk, Pv, format>(plan, side);
}

// Fills the key side: statistics, then tiles. With heads enough for all threads, both for one head while it is near.
template <class Qk, class Pv>
void pack_keys(const Job& job, const ForwardPlan& plan, const Signs& signs, const KeySide& side) {
  const Problem& p = *job.problem;
  const int64_t sides = job.sequence_count * p.kv_heads;
  const bool statistics = plan.smooth_k || plan.smooth_v || side.v_unit || side.seen;
  const auto summarise = [&](int64_t task) {
    const int64_t sequence = task / p.kv_heads, g = task % p.kv_heads;
    const Sequence& seq = job.sequences[sequence];
    const int64_t first_tile = seq.k_tokens ? first_tile_of(job, sequence) : 0;
    if (side.seen) list_seen_keys(p, seq, g, side.seen + side.tile_index(g, first_tile) * kKeys);
    channel_statistics(p, plan, seq, g, task, side.seen_keys(p, seq, g, first_tile), side);
  };
  const auto pack = [&](const Block& block) {
    const FlushDenormals flush;
    pack_key_tile<Qk, Pv>(p, plan, job.sequences[block.sequence], block, signs, side);
  };
  if (statistics && sides >= job.threads) {
    parallel_for(job.threads, sides, [&](int64_t task, unsigned) {
      const int64_t sequence = task / p.kv_heads;
      summarise(task);
      for (int64_t token = 0; token < job.sequences[sequence].k_tokens; token += kKeys)
        pack({sequence, task % p.kv_heads, token, first_tile_of(job, sequence)});
    });
    return;
  }
  if (statistics) parallel_for(job.threads, sides, [&](int64_t task, unsigned) { summarise(task); });
  parallel_for(job.threads, job.key_tile_count, [&](int64_t task, unsigned) { pack(job.key_tiles[task]); });
}

template <class Qk, class Pv, PFormat format>
void forward_as(const Job& job, const ForwardPlan& plan) {
  const Problem& p = *job.problem;
  WorkspaceAllocator workspace(job.workspace);
  const KeySide side = allocate_key_side<Qk, Pv>(p, plan, workspace);
  const std::size_t scratch_bytes = forward_scratch_bytes<Qk, Pv, format>(plan, side);
  char* scratch = workspace.take<char>(static_cast<int64_t>(job.threads * scratch_bytes));
  const Signs signs(p.q, p.dim);
  pack_keys<Qk, Pv>(job, plan, signs, side);
  parallel_for(job.threads, job.query_block_count, [&](int64_t task, unsigned thread) {
    const Block& block = job.query_blocks[task];
    WorkspaceAllocator own(scratch + thread * scratch_bytes);
    const FlushDenormals flush;
    configure_tiles();
    Forward<Qk, Pv, format> forward{p, plan, side, signs, ForwardScratch<Qk, Pv>::allocate(plan, side, own), {}, {}};
    const int64_t next = std::min<int64_t>(task + job.threads, job.query_block_count - 1);
    forward.run(job.sequences[block.sequence], block, job.query_blocks[next]);
    release_tiles();
  });
}

// Calls body with the engines and P format of a plan.
template <class Body>
auto with_engines(const ForwardPlan& plan, Body&& body) {
  const bool int8 = plan.qk == OCTET_I8;
  switch (plan.p) {
    case PFormat::u8:
      return body.template operator()<Int8, UInt8, PFormat::u8>();
    case PFormat::e4m3:
      return int8 ? body.template operator()<Int8, Bf16, PFormat::e4m3>()
                  : body.template operator()<Bf16, Bf16, PFormat::e4m3>();
    case PFormat::bf16:
      return body.template operator()<Bf16, Bf16, PFormat::bf16>();
    case PFormat::f16:
      if (int8) return body.template operator()<Int8, F32, PFormat::f16>();
      return plan.qk == OCTET_BF16 ? body.template operator()<Bf16, F32, PFormat::f16>()
                                   : body.template operator()<F32, F32, PFormat::f16>();
    default:
      return body.template operator()<Split, Split, PFormat::exact>();
  }
}

inline std::size_t forward_workspace(const Problem& p, unsigned threads) {
  const ForwardPlan plan = forward_plan(p);
  return with_engines(plan, [&]<class Qk, class Pv, PFormat format>() {
    return forward_workspace_as<Qk, Pv, format>(p, plan, threads);
  });
}

inline int64_t forward_block_rows(const Problem& p) {
  return with_engines(forward_plan(p), []<class Qk, class Pv, PFormat format>() { return kBlockRows<Qk, Pv>; });
}

inline void forward(const Job& job) {
  const ForwardPlan plan = forward_plan(*job.problem);
  with_engines(plan, [&]<class Qk, class Pv, PFormat format>() { forward_as<Qk, Pv, format>(job, plan); });
}

}  // namespace octet::cpu::OCTET_ISA
