// o, lse and the derivative of o along tangents tq, tk, tv, in one loop over tiles of keys (forward-mode
// differentiation of online softmax). For each key tile:
//   s = q k^T,  ts = scale [tq, q] [k, tk]^T              the second as one product of twice the depth
//   ts is multiplied by the derivative of a softcap
//   m' = max(m, rowmax(s)),  p = exp(s - m'),  alpha = exp(m - m'),  h = p (ts - c)
//   l = alpha l + rowsum(p),  r = alpha r + rowsum(h)
//   o = alpha o + p v,  t = alpha t + [p, h] [tv; v]      the second as one product of twice the depth
// where a product with a tangent that is absent is left out, dropped elements of p and h count in l and r alone, and at
// the end o / l, to = (t - r o / l) / l, lse = m + ln l.
//
// A constant added to a row of ts cancels between t and r o. So c, the mean of ts weighted by p in the first tile that
// the row sees, only keeps h small, and with it the error of rounding h. l and r sum the rounded p and h, so that their
// roundings cancel against those in o and t.
#pragma once
#include <cmath>

#include "cpu/attention/pack/keys.h"
#include "cpu/attention/pack/queries.h"
#include "cpu/attention/softmax/dropout.h"
#include "cpu/attention/softmax/softmax.h"
#include "cpu/parallel.h"
#include "cpu/sinks.h"

namespace octet::cpu::OCTET_ISA {

// A tile holds k above tk and tv above v: q meets the upper half of the former, p the lower half of the latter.
struct JvpSide {
  KeySide primal, tangent;

  template <class E>
  static JvpSide allocate(const Problem& p, const ForwardNumerics& numerics, WorkspaceAllocator& workspace) {
    JvpSide s;
    s.primal = s.tangent = allocate_key_side<E, E>(p, numerics, workspace, 2);
    if (s.primal.k) {  // null while sizes are measured
      s.tangent.k += s.primal.k_words * kKeys;
      s.primal.v += s.primal.v_words * s.primal.v_columns;
    }
    s.tangent.v_finite = workspace.take<bool>(key_tiles_bound(p) * p.kv_heads);
    return s;
  }
};

// Scratch memory of one thread.
template <class E>
struct JvpScratch {
  static constexpr int64_t kRows = kQueries;

  Word* q;                  // [kRows][2 * k_words]: tq, then q
  float *s, *ts;            // [kRows][kKeys]
  typename E::Element* ph;  // [kRows][2 * p_stride]: p, then h
  float *o, *t;             // [kRows][columns]
  int64_t p_stride;

  static JvpScratch allocate(const KeySide& side, WorkspaceAllocator& workspace) {
    JvpScratch x;
    x.p_stride = padded<E>(kKeys);
    x.q = workspace.take<Word>(kRows * 2 * side.k_words);
    x.s = workspace.take<float>(kRows * kKeys);
    x.ts = workspace.take<float>(kRows * kKeys);
    x.ph = workspace.take<typename E::Element>(kRows * 2 * x.p_stride);
    x.o = workspace.take<float>(kRows * side.v_columns);
    x.t = workspace.take<float>(kRows * side.v_columns);
    return x;
  }
};

// Softmax state of the rows of a block.
struct JvpState {
  alignas(64) float l[kQueries][kLanes], r[kQueries][kLanes];  // partial sums
  float m[kQueries];
  float centre[kQueries];  // c
  float alpha[kQueries];
  float row_bias[kQueries];  // row_bias_of
};

// The mean of x weighted by p; keys whose p is 0 may hold anything.
OCTET_INLINE float weighted_mean(const Vf (&p)[kVectors], const Vf (&x)[kVectors]) {
  Vf product[kVectors];
  for (int v = 0; v < kVectors; ++v) product[v] = p[v] == Vf{} ? Vf{} : p[v] * x[v];
  return reduce_add(add_up(product)) / reduce_add(add_up(p));
}

// One row of a tile: from s and ts to p and h. Leaves alpha for the accumulators.
template <class E, PFormat format, bool partial>
OCTET_INLINE void jvp_row(const float* s, const float* ts, const TileRow& row, float scale, float scale_log2, int64_t i,
                          JvpState& state, typename E::Element* p_out, typename E::Element* h_out) {
  constexpr int degree = exp2_degree(format);
  Vf x[kVectors], p[kVectors], h[kVectors], derivative[kVectors];
  load_logits<partial, false>(s, row, scale, x, derivative);
  const float old = state.m[i], largest = largest_of(x);
  const bool moved = largest > old;
  const float m = moved ? largest : old, base = m == kMinusInfinity ? 0.f : m;
  const float alpha = moved ? scalar_exp2<degree>((old - m) * scale_log2) : 1.f;
  state.m[i] = m;
  state.alpha[i] = alpha;

  for (int v = 0; v < kVectors; ++v) p[v] = exp2<degree>((x[v] - base) * scale_log2);
  for (int v = 0; v < kVectors; ++v) x[v] = load(ts + v * kLanes) * scale;
  if constexpr (partial) {
    if (row.terms.softcap != 0.f)
      for (int v = 0; v < kVectors; ++v) x[v] *= derivative[v];
  }
  if (moved && old == kMinusInfinity) state.centre[i] = weighted_mean(p, x);
  const float centre = state.centre[i];
  for (int v = 0; v < kVectors; ++v) h[v] = p[v] == Vf{} ? Vf{} : p[v] * (x[v] - centre);
  store_p<E, format>(p, 1.f, p_out);
  store_p<E, format>(h, 1.f, h_out);
  store(state.l[i], load(state.l[i]) * alpha + add_up(p));
  store(state.r[i], load(state.r[i]) * alpha + add_up(h));
}

template <class E, PFormat format>
struct Jvp {
  static constexpr int64_t kRows = JvpScratch<E>::kRows;

  const Problem &p, &tangents;  // tangents: those that there are of q, k and v, in their place
  const ForwardNumerics& numerics;
  const JvpSide& side;
  const Signs& signs;
  JvpScratch<E> scratch;
  JvpState state;

  void run(const Sequence& seq, const Block& block) {
    const int64_t h = block.head, token = block.token;
    const int64_t rows = seq.q_tokens - token < kRows ? seq.q_tokens - token : kRows;
    start(seq, h, token, rows);
    const KeyRange keys = p.keys_of_block(token, rows, seq.q_tokens, seq.k_tokens);
    const int64_t tiles = keys.first < keys.last ? (keys.last + kKeys - 1) / kKeys : 0;
    for (int64_t tile = keys.first / kKeys; tile < tiles; ++tile) {
      const int64_t index = side.primal.tile_index(h / p.group(), block.first_tile + tile);
      logits(rows, index);
      softmax_tile(seq, h, token, rows, tile * kKeys);
      if (p.dropout) drop_p_and_h(seq, h, token, rows, tile * kKeys);
      accumulate(rows, index);
    }
    finish(seq, h, token, rows);
  }

  void start(const Sequence& seq, int64_t h, int64_t token, int64_t rows) {
    QueryRows queries;
    const int64_t words = side.primal.k_words, columns = side.primal.v_columns;
    if (p.tq.present())
      pack_queries<E>(tangents, numerics, seq, h, token, rows, kRows, signs, nullptr, scratch.q, 2 * words, words,
                      queries);
    pack_queries<E>(p, numerics, seq, h, token, rows, kRows, signs, nullptr, scratch.q + words, 2 * words, words,
                    queries);
    for (int64_t i = 0; i < kRows; ++i) {
      state.row_bias[i] = i < rows ? row_bias_of(p, seq, h, token + i) : 0.f;
      state.m[i] = kMinusInfinity;
      state.centre[i] = 0.f;
    }
    std::memset(state.l, 0, sizeof state.l);
    std::memset(state.r, 0, sizeof state.r);
    std::memset(scratch.ph, 0, sizeof *scratch.ph * kRows * 2 * scratch.p_stride);
    std::memset(scratch.o, 0, sizeof(float) * kRows * columns);
    std::memset(scratch.t, 0, sizeof(float) * kRows * columns);
  }

  void logits(int64_t rows, int64_t index) {
    const int64_t words = side.primal.k_words;
    const Strides q_strides{2 * words, 1};
    const Word* k = side.primal.k + index * side.primal.k_stride;
    matmul<E, false>(scratch.q + words, q_strides, k, kKeys, scratch.s, kKeys, rows, kKeys, words);
    const bool of_q = p.tq.present(), of_k = p.tk.present();
    if (of_q || of_k)
      matmul<E, false>(scratch.q + (of_q ? 0 : words), q_strides, k + (of_q ? 0 : words * kKeys), kKeys, scratch.ts,
                       kKeys, rows, kKeys, (of_q + of_k) * words);
    else
      std::memset(scratch.ts, 0, sizeof(float) * rows * kKeys);
  }

  void softmax_tile(const Sequence& seq, int64_t h, int64_t token, int64_t rows, int64_t key) {
    TileRow row{nullptr, nullptr, 0, 0, nullptr, p.mask.dtype, p.mask.stride[3], 0.f};
    const float scale_log2 = softmax_scale_log2();
    const bool plain = p.plain_logits();
    for (int64_t i = 0; i < rows; ++i) {
      const KeyRange seen = p.keys_of(token + i, seq.q_tokens, seq.k_tokens);
      row.first = static_cast<int>(seen.first > key ? seen.first - key : 0);
      row.last = static_cast<int>(seen.last < key + kKeys ? seen.last - key : kKeys);
      const float *s = scratch.s + i * kKeys, *ts = scratch.ts + i * kKeys;
      auto* p_out = scratch.ph + i * 2 * scratch.p_stride;
      auto* h_out = p_out + scratch.p_stride;
      if (p.mask.present()) row.mask = mask_row(p, seq.batch, h, token + i, key);
      if (!plain) row.row_bias = state.row_bias[i], row.terms = terms_of(p, seq, h, token + i, key, 0.0);
      if (row.first > 0 || row.last < kKeys || !plain)
        jvp_row<E, format, true>(s, ts, row, p.scale, scale_log2, i, state, p_out, h_out);
      else
        jvp_row<E, format, false>(s, ts, row, p.scale, scale_log2, i, state, p_out, h_out);
    }
  }

  // Takes the elements that dropout drops from p and h; l and r keep them.
  __attribute__((noinline)) void drop_p_and_h(const Sequence& seq, int64_t h, int64_t token, int64_t rows,
                                              int64_t key) {
    uint64_t kept[kRows];
    find_kept(p.dropout_stream(seq, h), p.dropout, token, rows, key, kept);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t half = 0; half < 2; ++half) drop(kept[i], scratch.ph + (2 * i + half) * scratch.p_stride);
  }

  // log2(e) times what turns a result of load_logits into a logit.
  float softmax_scale_log2() const { return p.plain_logits() ? p.scale * kLog2e : kLog2e; }

  void accumulate(int64_t rows, int64_t index) {
    const int64_t columns = side.primal.v_columns, words = side.primal.v_words;
    for (int64_t i = 0; i < rows; ++i) {
      const float alpha = state.alpha[i];
      if (alpha == 1.f) continue;
      for (int64_t c = i * columns; c < (i + 1) * columns; c += kLanes) {
        store(scratch.o + c, load(scratch.o + c) * alpha);
        store(scratch.t + c, load(scratch.t + c) * alpha);
      }
    }
    const Strides strides{2 * scratch.p_stride / E::kPerWord, 1};
    const Word *tv = side.tangent.v + index * side.tangent.v_stride, *v = side.primal.v + index * side.primal.v_stride;
    const bool of_v = p.tv.present(), of_logits = p.tq.present() || p.tk.present();
    const auto* const ph = scratch.ph + (of_v ? 0 : scratch.p_stride);
    const Word* const tv_v = of_v ? tv : v;
    const int64_t depth = (of_v + of_logits) * words;
    if (side.primal.v_finite[index] && side.tangent.v_finite[index]) {
      matmul<E, true>(scratch.ph, strides, v, columns, scratch.o, columns, rows, columns, words);
      if (depth) matmul<E, true>(ph, strides, tv_v, columns, scratch.t, columns, rows, columns, depth);
    } else {
      matmul_skipping_zeros<E>(scratch.ph, strides, v, columns, scratch.o, columns, rows, columns, words);
      if (depth) matmul_skipping_zeros<E>(ph, strides, tv_v, columns, scratch.t, columns, rows, columns, depth);
    }
  }

  // A sink leaves the keys the share w = exp(lse of the keys - lse) of all probabilities, and takes of_sink = 1 - w:
  //   o = w o     to = w (to + of_sink (tlse - tsink) o)     tlse = w tlse + of_sink tsink
  void finish(const Sequence& seq, int64_t h, int64_t token, int64_t rows) {
    const float sink = sink_of(p, seq.batch, h),
                tsink = p.tsinks.present() ? *p.tsinks.at<float>(seq.batch, h, 0) : 0.f;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = seq.q_first + token + i;
      float *o = scratch.o + i * side.primal.v_columns, *to = scratch.t + i * side.primal.v_columns;
      const float l = reduce_add(load(state.l[i])), r = reduce_add(load(state.r[i]));
      const bool seen = l != 0.f;
      const float inverse = seen ? 1.f / l : 0.f;
      for (int64_t c = 0; c < p.dim_v; ++c) {
        o[c] = seen ? o[c] * inverse : 0.f;
        to[c] = seen ? (to[c] - r * o[c]) * inverse : 0.f;
      }
      const double m = static_cast<double>(state.m[i]) * softmax_scale_log2() / 1.44269504088896340736;
      const double of_keys = seen ? m + std::log(static_cast<double>(l)) + state.row_bias[i] : kMinusInfinity;
      const double lse = with_sink(of_keys, sink);
      const float w = static_cast<float>(probability_of(of_keys, lse)),
                  of_sink = static_cast<float>(probability_of(sink, lse));
      const float mean = seen ? state.centre[i] + r * inverse : 0.f;
      if (sink != kMinusInfinity)
        for (int64_t c = 0; c < p.dim_v; ++c) {
          to[c] = w * (to[c] + of_sink * (mean - tsink) * o[c]);
          o[c] *= w;
        }
      if (p.dropout)
        for (int64_t c = 0; c < p.dim_v; ++c)
          for (float* x : {o, to}) x[c] *= static_cast<float>(p.dropout_scale());
      store_row(p.o, seq.batch, h, at, o);
      store_row(p.to, seq.batch, h, at, to);
      if (p.lse.present()) *p.lse.at<float>(seq.batch, h, at) = static_cast<float>(lse);
      if (p.tlse.present()) *p.tlse.at<float>(seq.batch, h, at) = w * mean + of_sink * tsink;
    }
  }
};

template <class E>
std::size_t jvp_scratch_bytes(const KeySide& side) {
  WorkspaceAllocator workspace(nullptr);
  JvpScratch<E>::allocate(side, workspace);
  return workspace.used();
}

template <class E>
std::size_t jvp_workspace_as(const Problem& p, const ForwardNumerics& numerics, unsigned threads) {
  WorkspaceAllocator workspace(nullptr);
  const JvpSide side = JvpSide::allocate<E>(p, numerics, workspace);
  return workspace.used() + threads * jvp_scratch_bytes<E>(side.primal);
}

template <class E, PFormat format>
void jvp_as(const Job& job, const ForwardNumerics& numerics) {
  const Problem& p = *job.problem;
  Problem tangents = p;
  if (p.tq.present()) tangents.q = p.tq;
  if (p.tk.present()) tangents.k = p.tk;
  if (p.tv.present()) tangents.v = p.tv;
  WorkspaceAllocator workspace(job.workspace);
  const JvpSide side = JvpSide::allocate<E>(p, numerics, workspace);
  const std::size_t scratch_bytes = jvp_scratch_bytes<E>(side.primal);
  char* scratch = workspace.take<char>(static_cast<int64_t>(job.threads * scratch_bytes));
  const Signs signs(p.q, p.dim);
  parallel_for(job.threads, job.key_tile_count, [&](int64_t task, unsigned) {
    const Block& block = job.key_tiles[task];
    const Sequence& seq = job.sequences[block.sequence];
    pack_key_tile<E, E>(p, numerics, seq, block, signs, side.primal);
    pack_key_tile<E, E>(tangents, numerics, seq, block, signs, side.tangent);
  });
  parallel_for(job.threads, job.query_block_count, [&](int64_t task, unsigned thread) {
    const Block& block = job.query_blocks[task];
    WorkspaceAllocator own(scratch + thread * scratch_bytes);
    configure_tiles();
    Jvp<E, format> jvp{p, tangents, numerics, side, signs, JvpScratch<E>::allocate(side.primal, own), {}};
    jvp.run(job.sequences[block.sequence], block);
    release_tiles();
  });
}

// Calls body with the engine and P format of a numerics.
template <class Body>
auto with_jvp_engine(const ForwardNumerics& numerics, Body&& body) {
  switch (numerics.p) {
    case PFormat::bf16:
      return body.template operator()<Bf16, PFormat::bf16>();
    case PFormat::f16:
      return body.template operator()<F32, PFormat::f16>();
    default:
      return body.template operator()<F32, PFormat::exact>();
  }
}

inline std::size_t jvp_workspace(const Problem& p, unsigned threads) {
  const ForwardNumerics numerics = forward_numerics(p);
  return with_jvp_engine(numerics, [&]<class E, PFormat>() { return jvp_workspace_as<E>(p, numerics, threads); });
}

inline void jvp(const Job& job) {
  const ForwardNumerics numerics = forward_numerics(*job.problem);
  with_jvp_engine(numerics, [&]<class E, PFormat format>() { jvp_as<E, format>(job, numerics); });
}

}  // namespace octet::cpu::OCTET_ISA
