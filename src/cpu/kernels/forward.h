// Forward attention: online softmax (FlashAttention-2, arXiv 2307.08691, Algorithm 1) over tiles of kKeys keys.
//
// A task owns a block of queries of one head. For each key tile:
//   s = q k^T                        matmul, int32 or float
//   m' = max(m, rowmax(s)),  p = exp(s - m'),  alpha = exp(m - m')
//   l = alpha l + rowsum(p)
//   o = alpha o + p v                matmul; 8-bit P: through int32, with a scale per row
// and at the end o / l, lse = m + ln l. The maximum is subtracted before scaling, so the largest p is exactly 1.
//
// With tile instructions the loop is a pipeline: while the rows of tile t go through the softmax, the logits of tile
// t + 1 and the product of tile t - 1 with V are computed, a group of rows and a group of columns at a time. Tile
// instructions start slowly after half a microsecond without any (measured: 160 ns of work takes 470 ns), so they are
// spread evenly.
#pragma once
#include <cmath>

#include "cpu/kernels/softmax.h"
#include "cpu/parallel.h"

namespace octet::cpu::OCTET_ISA {

// Whether the product of a tile of P with V is formed apart and then added to o. 8-bit P: it is an integer. f16 P, the
// one that gradients build on: next to a large sum small weights would be lost one by one, always downwards; a few at a
// time they are not (coherence of the error of delta on tied maxima: .91, by tiles .13, by quarters of a tile below
// .1).
constexpr bool through_strip(PFormat format) { return format == PFormat::u8 || format == PFormat::f16; }
constexpr int64_t strip_parts(PFormat format) { return format == PFormat::f16 ? 4 : 1; }

// Rows of a block of queries: a multiple of the rows that the inner loop of the engine takes at a time (16, 6), as many
// as keep q, s, p and o in the nearest cache.
template <class Qk>
constexpr int64_t kBlockRows = Qk::kTiles ? 32 : 96;

// Scratch memory of one thread; in a pipeline, two of what tiles t and t + 1 use at the same time.
template <class Qk, class Pv>
struct ForwardScratch {
  static constexpr int64_t kRows = kBlockRows<Qk>;
  // Groups of rows and columns that a step of the pipeline is cut into.
  static constexpr bool kPipelined = Qk::kTiles || Pv::kTiles;
  static constexpr int64_t kGroups = kPipelined ? 4 : 1;
  // Without a pipeline, P may take the place of the logits it comes from.
  static constexpr bool kInPlace = !kPipelined && std::is_same_v<typename Qk::Sum, typename Pv::Element>;

  Word* q;                     // [kRows][k_words]
  typename Qk::Sum* s[2];      // [kRows][kKeys]
  typename Pv::Element* p[2];  // [kRows][p_stride]
  typename Pv::Sum* strip;     // [kRows][strip_columns] of P V, if it goes that way
  float* o;                    // [kRows][columns]
  int64_t p_stride, strip_columns;

  static ForwardScratch carve(const KeySide& side, bool through_strip, Carver& carve) {
    ForwardScratch t;
    t.p_stride = padded<Pv>(kKeys);
    t.strip_columns = (side.v_columns / kGroups + 15) / 16 * 16;
    t.q = carve.take<Word>(kRows * side.k_words);
    t.strip = through_strip ? carve.take<typename Pv::Sum>(kRows * t.strip_columns) : nullptr;
    t.o = carve.take<float>(kRows * side.v_columns);
    for (int i = 0; i < (kPipelined ? 2 : 1); ++i) {
      t.s[i] = carve.take<typename Qk::Sum>(kRows * kKeys);
      if constexpr (kInPlace)
        t.p[i] = t.s[i];
      else
        t.p[i] = carve.take<typename Pv::Element>(kRows * t.p_stride);
    }
    return t;
  }
};

// Softmax state of the rows of a block.
template <int64_t rows>
struct RowState {
  alignas(64) float l[rows][kLanes];  // partial sums
  float m[rows];
  float top[rows];        // remedy beta: largest logit so far; m may lie above it
  float unit[rows];       // logit * log2(e) per unit of x
  float to_logit[rows];   // logit per unit of sum * k_scale
  float alpha[2][rows];   // of tiles t and t + 1
  float p_step[2][rows];  // 8-bit P: o += p_step * product
};

// Codes of a row of P with its largest at `top`; returns their step.
template <class Pv>
OCTET_INLINE float quantize_p(Vf (&p)[kVectors], float largest, float top, typename Pv::Element* out) {
  constexpr float kNothing = 0x1p-110f;  // weighs nothing beside the row's largest, and its inverse may overflow
  const float inverse = largest > kNothing ? top / largest : 0.f;
  for (int v = 0; v < kVectors; ++v) p[v] *= inverse;
  store_u8<Pv>(p, out);
  return largest > kNothing ? largest * (1.f / top) : 0.f;
}

// One row of a tile: from logits to P. Leaves alpha and p_step for the accumulator.
template <class Qk, class Pv, PFormat format, bool partial>
OCTET_INLINE void softmax_row(const ForwardPlan& plan, float beta, const typename Qk::Sum* s, const TileRow& row,
                              const float* v_scale, bool v_finite, int i, int parity, RowState<kBlockRows<Qk>>& state,
                              typename Pv::Element* p_out) {
  constexpr int degree = exp2_degree(format);
  Vf x[kVectors];
  load_logits<partial, kBias<Qk> != 0>(s, row, state.to_logit[i], x);
  float m = largest_of(x);
  if (plan.beta) {
    const float top = m;
    m = shifted_maximum(x, top, state.top[i], beta, plan.beta_reach * kLog2e / state.unit[i]);
    state.top[i] = top > state.top[i] ? top : state.top[i];
  }
  const float old = state.m[i], unit = state.unit[i];
  float alpha = 1.f;
  if (m > old) {
    alpha = scalar_exp2<degree>((old - m) * unit);
    state.m[i] = m;
  } else {
    m = old;
  }
  state.alpha[parity][i] = alpha;
  const float base = m == kMinusInfinity ? 0.f : m;

  Vf p[kVectors];
  for (int v = 0; v < kVectors; ++v) p[v] = exp2<degree>((x[v] - base) * unit);
  Vf l;
  if constexpr (format == PFormat::u8) {
    l = add_up(p);
    for (int v = 0; v < kVectors; ++v) {
      x[v] = p[v] * load(v_scale + v * kLanes);
      if constexpr (partial) x[v] = p[v] == Vf{} ? p[v] : x[v];
    }
    state.p_step[parity][i] = quantize_p<Pv>(x, largest_of(x), plan.p_top, p_out);
    if (!v_finite) state.p_step[parity][i] += reduce_add(add_up(x) * 0.f);
  } else {
    const Vf un_rounded = add_up(p) * (scales_p(format) ? plan.p_top : 1.f);
    store_p<Pv, format>(p, plan.p_top, p_out);
    l = plan.l_from_p ? add_up(p) : un_rounded;
  }
  store(state.l[i], load(state.l[i]) * alpha + l);
}

// The same for 8-bit P and a tile that all of the row sees, with the maximum of earlier tiles: P gets a scale of its
// own in every tile, so m only has to keep p in the range of floats. False, with nothing changed, if it does not.
template <class Qk, class Pv>
OCTET_INLINE bool softmax_row_lazily(const ForwardPlan& plan, const typename Qk::Sum* s, const TileRow& row,
                                     const float* v_scale, int i, int parity, RowState<kBlockRows<Qk>>& state,
                                     typename Pv::Element* p_out) {
  constexpr float kRange = 0x1p60f;
  const float unit = state.unit[i], shift = state.m[i] * unit;
  Vf x[kVectors], p[kVectors];
  load_logits<false, kBias<Qk> != 0>(s, row, 1.f, x);
  for (int v = 0; v < kVectors; ++v) {
    p[v] = exp2<kExp2For8Bits>(x[v] * unit - shift);
    x[v] = p[v] * load(v_scale + v * kLanes);
  }
  const Vf l = add_up(p);
  const float largest = largest_of(x);
  if (!(largest < kRange && reduce_is_finite(l))) return false;
  state.alpha[parity][i] = 1.f;
  state.p_step[parity][i] = quantize_p<Pv>(x, largest, plan.p_top, p_out);
  store(state.l[i], load(state.l[i]) + l);
  return true;
}

// o = alpha o + step product, for one row of a strip of columns.
template <class Sum>
OCTET_INLINE void add_product(float* o, const Sum* product, float alpha, float step, int64_t columns) {
  for (int64_t c = 0; c < columns; c += kLanes) store(o + c, load(o + c) * alpha + to_float(load(product + c)) * step);
}

OCTET_INLINE void scale_row(float* o, float alpha, int64_t columns) {
  for (int64_t c = 0; c < columns; c += kLanes) store(o + c, load(o + c) * alpha);
}

template <class Qk, class Pv, PFormat format>
struct Forward {
  using Scratch = ForwardScratch<Qk, Pv>;
  static constexpr int64_t kRows = Scratch::kRows, kGroups = Scratch::kGroups;

  const Problem& p;
  const ForwardPlan& plan;
  const KeySide& side;
  const Signs& signs;
  Scratch scratch;
  RowState<kRows> state;

  void run(const Sequence& seq, const Block& block) {
    const int64_t h = block.head, token = block.token;
    const int64_t rows = seq.q_tokens - token < kRows ? seq.q_tokens - token : kRows;
    const int64_t g = h / p.group();
    start(seq, h, token, rows);

    const KeyRange keys = p.keys_of_block(token, rows, seq.q_tokens, seq.k_tokens);
    const int64_t first = keys.first / kKeys, last = keys.first < keys.last ? (keys.last + kKeys - 1) / kKeys : first;
    const auto index = [&](int64_t tile) { return (block.first_tile + tile) * p.kv_heads + g; };
    if constexpr (Scratch::kPipelined) {
      if (first < last)
        for (int64_t group = 0; group < kGroups; ++group) logits(index(first), rows, group, 0);
      for (int64_t tile = first; tile <= last && first < last; ++tile) {
        const int parity = static_cast<int>(tile - first) & 1;
        for (int64_t group = 0; group < kGroups; ++group) {
          if (tile < last) softmax_rows(seq, h, token, rows, group, tile, index(tile), parity);
          if (tile + 1 < last) logits(index(tile + 1), rows, group, 1 - parity);
          if (tile > first) accumulate(index(tile - 1), rows, group, 1 - parity);
        }
      }
    } else {
      for (int64_t tile = first; tile < last; ++tile) {
        logits(index(tile), rows, 0, 0);
        softmax_rows(seq, h, token, rows, 0, tile, index(tile), 0);
        accumulate(index(tile), rows, 0, 0);
      }
    }
    finish(seq, h, token, rows, block.sequence * p.kv_heads + g);
  }

  void start(const Sequence& seq, int64_t h, int64_t token, int64_t rows) {
    float steps[kRows];
    pack_queries<Qk>(p, plan, seq, h, token, rows, kRows, signs, scratch.q, side.k_words, side.k_words, steps);
    for (int64_t i = 0; i < kRows; ++i) {
      state.m[i] = state.top[i] = kMinusInfinity;
      state.to_logit[i] = steps[i] * p.scale;
      state.unit[i] = p.mask.present() ? kLog2e : state.to_logit[i] * kLog2e;
    }
    std::memset(state.l, 0, sizeof state.l);
    std::memset(scratch.o, 0, sizeof(float) * kRows * side.v_columns);
    for (int i = 0; i < (Scratch::kPipelined ? 2 : 1); ++i)
      std::memset(scratch.p[i], 0, sizeof *scratch.p[i] * kRows * scratch.p_stride);
  }

  // A group of columns of q k^T.
  void logits(int64_t index, int64_t rows, int64_t group, int parity) {
    constexpr int64_t columns = kKeys / kGroups;
    matmul<Qk, false>(scratch.q, {side.k_words, 1}, side.k + index * side.k_words * kKeys + group * columns, kKeys,
                      scratch.s[parity] + group * columns, kKeys, rows, columns, side.k_words);
  }

  // A group of rows of a tile, from logits to P.
  void softmax_rows(const Sequence& seq, int64_t h, int64_t token, int64_t rows, int64_t group, int64_t tile,
                    int64_t index, int parity) {
    const int64_t key = tile * kKeys;
    TileRow row{side.k_scale ? side.k_scale + index * kKeys : nullptr,
                side.k_correction ? side.k_correction + index * kKeys : nullptr,
                0,
                0,
                nullptr,
                p.mask.dtype,
                p.mask.stride[3]};
    const float* v_scale = side.v_scale ? side.v_scale + index * kKeys : nullptr;
    const bool v_finite = side.v_finite[index];
    const int64_t begin = group * (kRows / kGroups),
                  end = begin + kRows / kGroups < rows ? begin + kRows / kGroups : rows;
    if (begin >= end) return;
    const bool all_seen = !p.mask.present() && p.keys_of(token + end - 1, seq.q_tokens, seq.k_tokens).first <= key &&
                          p.keys_of(token + begin, seq.q_tokens, seq.k_tokens).last >= key + kKeys;
    for (int64_t i = begin; i < end; ++i) {
      const auto* s = scratch.s[parity] + i * kKeys;
      auto* out = scratch.p[parity] + i * scratch.p_stride;
      const int r = static_cast<int>(i);
      if (all_seen) {
        if constexpr (format == PFormat::u8)
          if (v_finite && state.m[i] != kMinusInfinity &&
              softmax_row_lazily<Qk, Pv>(plan, s, row, v_scale, r, parity, state, out))
            continue;
        softmax_row<Qk, Pv, format, false>(plan, p.beta, s, row, v_scale, v_finite, r, parity, state, out);
      } else {
        const KeyRange seen = p.keys_of(token + i, seq.q_tokens, seq.k_tokens);
        row.first = static_cast<int>(seen.first > key ? seen.first - key : 0);
        row.last = static_cast<int>(seen.last < key + kKeys ? seen.last - key : kKeys);
        if (p.mask.present()) row.mask = mask_row(p, seq.batch, h, token + i, key);
        softmax_row<Qk, Pv, format, true>(plan, p.beta, s, row, v_scale, v_finite, r, parity, state, out);
      }
    }
  }

  // A group of columns of o = alpha o + P V.
  void accumulate(int64_t index, int64_t rows, int64_t group, int parity) {
    const int64_t columns = side.v_columns, first = group * scratch.strip_columns;
    if (first >= columns) return;
    const int64_t n = columns - first < scratch.strip_columns ? columns - first : scratch.strip_columns;
    const Word* v = side.v + index * side.v_words * columns + first;
    const Strides p_strides{scratch.p_stride / Pv::kPerWord, 1};
    float* o = scratch.o + first;
    if constexpr (through_strip(format)) {
      const int64_t words = side.v_words / strip_parts(format);
      for (int64_t part = 0; part < strip_parts(format); ++part) {
        const auto* p_part = scratch.p[parity] + part * words * Pv::kPerWord;
        multiply_strip(p_part, p_strides, v + part * words * columns, rows, n, words, side.v_finite[index]);
        for (int64_t i = 0; i < rows; ++i) {
          const float step = format == PFormat::u8 ? state.p_step[parity][i] : 1.f;
          add_product(o + i * columns, scratch.strip + i * scratch.strip_columns, part ? 1.f : state.alpha[parity][i],
                      step, n);
        }
      }
    } else {
      for (int64_t i = 0; i < rows; ++i)
        if (state.alpha[parity][i] != 1.f) scale_row(o + i * columns, state.alpha[parity][i], n);
      if (side.v_finite[index])
        matmul<Pv, true>(scratch.p[parity], p_strides, v, columns, o, columns, rows, n, side.v_words);
      else
        matmul_skipping_zeros<Pv>(scratch.p[parity], p_strides, v, columns, o, columns, rows, n, side.v_words);
    }
  }

  void multiply_strip(const void* p_part, Strides p_strides, const Word* v, int64_t rows, int64_t n, int64_t words,
                      bool v_finite) {
    const int64_t columns = side.v_columns, stride = scratch.strip_columns;
    if (format == PFormat::u8 || v_finite)
      return matmul<Pv, false>(p_part, p_strides, v, columns, scratch.strip, stride, rows, n, words);
    if constexpr (format != PFormat::u8) {
      std::memset(scratch.strip, 0, sizeof(float) * rows * stride);
      matmul_skipping_zeros<Pv>(p_part, p_strides, v, columns, scratch.strip, stride, rows, n, words);
    }
  }

  void finish(const Sequence& seq, int64_t h, int64_t token, int64_t rows, int64_t side_index) {
    const int64_t columns = side.v_columns;
    float residual[kMaxDim];
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = seq.q_first + token + i;
      float* o = scratch.o + i * columns;
      const float l = reduce_add(load(state.l[i]));
      const bool seen = l != 0.f;
      const float inverse = seen ? 1.f / l : 0.f;
      for (int64_t c = 0; c < columns; ++c) o[c] = seen ? o[c] * inverse : 0.f;
      if (side.v_channel)
        for (int64_t c = 0; c < p.dim_v; ++c) o[c] *= v_step(plan, side.v_channel[side_index * kMaxDim + c]).step;
      if (plan.smooth_v && seen)
        for (int64_t c = 0; c < p.dim_v; ++c) o[c] += side.v_mean[side_index * kMaxDim + c];
      store_row(p.o, seq.batch, h, at, o);
      if (p.o_residual.present()) {
        std::memcpy(residual, o, sizeof(float) * p.dim_v);
        round_row(p.o.dtype, residual, p.dim_v);
        for (int64_t c = 0; c < p.dim_v; ++c) residual[c] = o[c] - residual[c];
        store_row(p.o_residual, seq.batch, h, at, residual);
      }
      if (p.lse.present())
        *p.lse.at<float>(seq.batch, h, at) =
            seen ? lse(seq, h, at, static_cast<int>(i), l, side_index) : kMinusInfinity;
    }
  }

  // In the gauge of the caller's k: smoothing moved every logit of the row by scale q.mean.
  float lse(const Sequence& seq, int64_t h, int64_t at, int i, float l, int64_t side_index) const {
    const double unit = static_cast<double>(state.unit[i]) / 1.44269504088896340736;
    double value = state.m[i] * unit + std::log(static_cast<double>(l) / (scales_p(format) ? plan.p_top : 1.f));
    if (plan.smooth_k) value += p.scale * dot_with_mean(p, plan, seq, h, at, signs, side.k_mean + side_index * kMaxDim);
    return static_cast<float>(value);
  }
};

// Bytes of scratch memory of one thread.
template <class Qk, class Pv, PFormat format>
std::size_t forward_scratch_bytes(const KeySide& side) {
  Carver carve(nullptr);
  ForwardScratch<Qk, Pv>::carve(side, through_strip(format), carve);
  return carve.used();
}

template <class Qk, class Pv, PFormat format>
std::size_t forward_workspace_as(const Problem& p, const ForwardPlan& plan, unsigned threads) {
  Carver carve(nullptr);
  const KeySide side = carve_key_side<Qk, Pv>(p, plan, carve);
  return carve.used() + threads * forward_scratch_bytes<Qk, Pv, format>(side);
}

// Fills the key side: statistics, then tiles.
template <class Qk, class Pv>
void pack_keys(const Job& job, const ForwardPlan& plan, const Signs& signs, const KeySide& side) {
  const Problem& p = *job.problem;
  if (plan.smooth_k || plan.smooth_v || side.v_channel)
    parallel_for(job.threads, job.sequence_count * p.kv_heads, [&](int64_t task, unsigned) {
      channel_statistics(p, plan, job.sequences[task / p.kv_heads], task % p.kv_heads, task, side);
    });
  parallel_for(job.threads, job.key_tile_count, [&](int64_t task, unsigned) {
    const Block& block = job.key_tiles[task];
    const FlushDenormals flush;
    pack_key_tile<Qk, Pv>(p, plan, job.sequences[block.sequence], block, signs, side);
  });
}

template <class Qk, class Pv, PFormat format>
void forward_as(const Job& job, const ForwardPlan& plan) {
  const Problem& p = *job.problem;
  Carver carve(job.workspace);
  const KeySide side = carve_key_side<Qk, Pv>(p, plan, carve);
  const std::size_t scratch_bytes = forward_scratch_bytes<Qk, Pv, format>(side);
  char* scratch = carve.take<char>(static_cast<int64_t>(job.threads * scratch_bytes));
  const Signs signs(p.q, p.dim);
  pack_keys<Qk, Pv>(job, plan, signs, side);
  parallel_for(job.threads, job.query_block_count, [&](int64_t task, unsigned thread) {
    const Block& block = job.query_blocks[task];
    Carver own(scratch + thread * scratch_bytes);
    const FlushDenormals flush;
    configure_tiles();
    Forward<Qk, Pv, format> forward{
        p, plan, side, signs, ForwardScratch<Qk, Pv>::carve(side, through_strip(format), own), {}};
    forward.run(job.sequences[block.sequence], block);
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
      return body.template operator()<F32, F32, PFormat::exact>();
  }
}

inline std::size_t forward_workspace(const Problem& p, unsigned threads) {
  const ForwardPlan plan = forward_plan(p);
  return with_engines(plan, [&]<class Qk, class Pv, PFormat format>() {
    return forward_workspace_as<Qk, Pv, format>(p, plan, threads);
  });
}

inline int64_t forward_block_rows(const Problem& p) {
  return with_engines(forward_plan(p), []<class Qk, class Pv, PFormat format>() { return kBlockRows<Qk>; });
}

inline void forward(const Job& job) {
  const ForwardPlan plan = forward_plan(*job.problem);
  with_engines(plan, [&]<class Qk, class Pv, PFormat format>() { forward_as<Qk, Pv, format>(job, plan); });
}

}  // namespace octet::cpu::OCTET_ISA
