// Forward attention: online softmax (FlashAttention-2, arXiv 2307.08691, Algorithm 1) over tiles of kKeys keys.
//
// A task owns kQueries queries of one head. For each key tile:
//   s = q k^T                        matmul, int32 or float
//   m' = max(m, rowmax(s)),  p = exp(s - m'),  alpha = exp(m - m')
//   l = alpha l + rowsum(p)
//   o = alpha o + p v                matmul; with 8-bit P through an int32 tile and a scale per row
// and at the end o / l, lse = m + ln l. The maximum is subtracted before scaling, so the largest p is exactly 1.
#pragma once
#include <cmath>

#include "cpu/kernels/softmax.h"
#include "cpu/parallel.h"

namespace octet::cpu::OCTET_ISA {

// Scratch memory of one thread.
template <class Qk, class Pv>
struct ForwardScratch {
  Word* q;                // [kQueries][k_words]
  typename Qk::Sum* s;    // [kQueries][kKeys]
  typename Pv::Element* p;  // [kQueries][p_stride]
  typename Pv::Sum* pv;   // [kQueries][columns], 8-bit P only
  float* o;               // [kQueries][columns]
  int64_t p_stride;

  static ForwardScratch carve(const KeySide& side, bool through_tile, Carver& carve) {
    ForwardScratch t;
    t.p_stride = padded<Pv>(kKeys);
    t.q = carve.take<Word>(kQueries * side.k_words);
    t.s = carve.take<typename Qk::Sum>(kQueries * kKeys);
    t.p = carve.take<typename Pv::Element>(kQueries * t.p_stride);
    t.pv = through_tile ? carve.take<typename Pv::Sum>(kQueries * side.v_columns) : nullptr;
    t.o = carve.take<float>(kQueries * side.v_columns);
    return t;
  }
};

// Softmax state of the rows of a task.
struct RowState {
  alignas(64) float l[kQueries][kLanes];  // partial sums
  float m[kQueries];
  float unit[kQueries];      // logit * log2(e) per unit of x
  float to_logit[kQueries];  // logit per unit of sum * k_scale
  float alpha[kQueries];
  float p_step[kQueries];    // 8-bit P: o += p_step * tile
};

// One row of a tile: from logits to P. Leaves alpha and p_step for the accumulator.
template <class Pv, PFormat format, bool partial, class Sum>
OCTET_INLINE void softmax_row(const ForwardPlan& plan, float beta, const Sum* s, const TileRow& row, const float* v_scale, int i, RowState& state,
                              typename Pv::Element* p_out) {
  Vf x[kVectors];
  load_logits<partial>(s, row, state.to_logit[i], x);
  float m = largest_of(x);
  if (plan.beta) m = shifted_maximum(x, m, beta, state.to_logit[i]);
  const float old = state.m[i];
  m = m > old ? m : old;
  state.m[i] = m;
  const float base = m == kMinusInfinity ? 0.f : m;
  const float unit = state.unit[i];
  const float alpha = m > old ? scalar_exp2((old - base) * unit) : 1.f;
  state.alpha[i] = alpha;

  Vf l{};
  if constexpr (format != PFormat::u8) {
    for (int v = 0; v < kVectors; ++v) {
      const Vf p = exp2((x[v] - base) * unit);
      const Vf rounded = store_p<Pv, format>(p, plan.p_top, p_out + v * kLanes);
      l += plan.l_from_p ? rounded : format == PFormat::e4m3 ? p * plan.p_top : p;
    }
  } else {
    Vf top{};
    for (int v = 0; v < kVectors; ++v) {
      const Vf p = exp2((x[v] - base) * unit);
      l += p;
      x[v] = p * load(v_scale + v * kLanes);
      if constexpr (partial) x[v] = p == Vf{} ? p : x[v];
      top = max(x[v], top);
    }
    const float largest = reduce_max(top);
    const Step step = step_of(largest, plan.p_top);
    state.p_step[i] = step.step;
    for (int v = 0; v < kVectors; ++v) store_u8<Pv>(x[v] * step.inverse, p_out + v * kLanes);
  }
  store(state.l[i], load(state.l[i]) * alpha + l);
}

// Multiplies row i of o by alpha; adds the 8-bit product, dequantised, if there is one.
template <class Sum>
OCTET_INLINE void scale_row(float* o, const Sum* pv, float alpha, float step, int64_t columns) {
  if (pv) {
    for (int64_t c = 0; c < columns; c += kLanes) store(o + c, load(o + c) * alpha + to_float(load(pv + c)) * step);
  } else if (alpha != 1.f) {
    for (int64_t c = 0; c < columns; c += kLanes) store(o + c, load(o + c) * alpha);
  }
}

template <class Qk, class Pv, PFormat format>
struct Forward {
  static constexpr bool kThroughTile = format == PFormat::u8;

  const Problem& p;
  const ForwardPlan& plan;
  const KeySide& side;
  const Signs& signs;
  ForwardScratch<Qk, Pv> scratch;
  RowState state;

  void run(const Sequence& seq, const Block& block) {
    const int64_t h = block.head, token = block.token;
    const int64_t rows = seq.q_tokens - token < kQueries ? seq.q_tokens - token : kQueries;
    const int64_t g = h / p.group();
    start(seq, h, token, rows);

    KeyRange keys = p.keys_of(token, seq.q_tokens, seq.k_tokens);
    const KeyRange last_keys = p.keys_of(token + rows - 1, seq.q_tokens, seq.k_tokens);
    keys.first = keys.first < last_keys.first ? keys.first : last_keys.first;
    keys.last = keys.last > last_keys.last ? keys.last : last_keys.last;
    if (keys.first < keys.last)
      for (int64_t tile = keys.first / kKeys; tile * kKeys < keys.last; ++tile) {
        const int64_t index = (block.first_tile + tile) * p.kv_heads + g;
        matmul<Qk, false>(scratch.q, {side.k_words, 1}, side.k + index * side.k_words * kKeys, kKeys, scratch.s, kKeys, rows, kKeys, side.k_words);
        softmax_tile(seq, h, token, rows, tile, index);
        accumulate(rows, index);
      }
    finish(seq, h, token, rows, block.sequence * p.kv_heads + g);
  }

  void start(const Sequence& seq, int64_t h, int64_t token, int64_t rows) {
    float steps[kQueries];
    pack_queries<Qk>(p, plan, seq, h, token, rows, signs, scratch.q, side.k_words, steps);
    for (int64_t i = 0; i < kQueries; ++i) {
      state.m[i] = kMinusInfinity;
      state.to_logit[i] = steps[i] * p.scale;
      state.unit[i] = p.mask.present() ? kLog2e : state.to_logit[i] * kLog2e;
    }
    std::memset(state.l, 0, sizeof state.l);
    std::memset(scratch.o, 0, sizeof(float) * kQueries * side.v_columns);
    std::memset(scratch.p, 0, sizeof *scratch.p * kQueries * scratch.p_stride);
  }

  void softmax_tile(const Sequence& seq, int64_t h, int64_t token, int64_t rows, int64_t tile, int64_t index) {
    const int64_t key = tile * kKeys;
    TileRow row{side.k_scale ? side.k_scale + index * kKeys : nullptr, side.k_correction ? side.k_correction + index * kKeys : nullptr, 0, 0,
                nullptr, p.mask.dtype, p.mask.stride[3]};
    const float* v_scale = side.v_scale ? side.v_scale + index * kKeys : nullptr;
    for (int64_t i = 0; i < rows; ++i) {
      const KeyRange seen = p.keys_of(token + i, seq.q_tokens, seq.k_tokens);
      row.first = static_cast<int>(seen.first > key ? seen.first - key : 0);
      row.last = static_cast<int>(seen.last < key + kKeys ? seen.last - key : kKeys);
      const auto* s = scratch.s + i * kKeys;
      auto* out = scratch.p + i * scratch.p_stride;
      if (p.mask.present()) row.mask = mask_row(p, seq.batch, h, token + i, key);
      if (row.first > 0 || row.last < kKeys || row.mask)
        softmax_row<Pv, format, true>(plan, p.beta, s, row, v_scale, static_cast<int>(i), state, out);
      else
        softmax_row<Pv, format, false>(plan, p.beta, s, row, v_scale, static_cast<int>(i), state, out);
    }
  }

  void accumulate(int64_t rows, int64_t index) {
    const Word* v = side.v + index * side.v_words * side.v_columns;
    const int64_t columns = side.v_columns;
    const Strides p_strides{scratch.p_stride / Pv::kPerWord, 1};
    if constexpr (kThroughTile) {
      matmul<Pv, false>(scratch.p, p_strides, v, columns, scratch.pv, columns, rows, columns, side.v_words);
      for (int64_t i = 0; i < rows; ++i) scale_row(scratch.o + i * columns, scratch.pv + i * columns, state.alpha[i], state.p_step[i], columns);
    } else {
      for (int64_t i = 0; i < rows; ++i) scale_row<float>(scratch.o + i * columns, nullptr, state.alpha[i], 0.f, columns);
      matmul<Pv, true>(scratch.p, p_strides, v, columns, scratch.o, columns, rows, columns, side.v_words);
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
      if (plan.v_scale == VScale::channel)
        for (int64_t c = 0; c < p.dim_v; ++c) o[c] *= side.v_channel[side_index * kMaxDim + c];
      if (plan.smooth_v && seen)
        for (int64_t c = 0; c < p.dim_v; ++c) o[c] += side.v_mean[side_index * kMaxDim + c];
      store_row(p.o, seq.batch, h, at, o);
      if (p.o_residual.present()) {
        std::memcpy(residual, o, sizeof(float) * p.dim_v);
        round_row(p.o.dtype, residual, p.dim_v);
        for (int64_t c = 0; c < p.dim_v; ++c) residual[c] = o[c] - residual[c];
        store_row(p.o_residual, seq.batch, h, at, residual);
      }
      if (p.lse.present()) *p.lse.at<float>(seq.batch, h, at) = seen ? lse(seq, h, at, static_cast<int>(i), l, side_index) : kMinusInfinity;
    }
  }

  // In the gauge of the caller's k: smoothing moved every logit of the row by scale q.mean.
  float lse(const Sequence& seq, int64_t h, int64_t at, int i, float l, int64_t side_index) const {
    const double unit = static_cast<double>(state.unit[i]) / 1.44269504088896340736;
    double value = state.m[i] * unit + std::log(static_cast<double>(l) / (format == PFormat::e4m3 ? plan.p_top : 1.f));
    if (plan.smooth_k) value += p.scale * dot_with_mean(p, seq, h, at, signs, side.k_mean + side_index * kMaxDim);
    return static_cast<float>(value);
  }
};

// Bytes of scratch memory of one thread.
template <class Qk, class Pv, PFormat format>
std::size_t forward_scratch_bytes(const KeySide& side) {
  Carver carve(nullptr);
  ForwardScratch<Qk, Pv>::carve(side, format == PFormat::u8, carve);
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
  if (plan.smooth_k || plan.smooth_v || plan.v_scale == VScale::channel)
    parallel_for(job.threads, job.sequence_count * p.kv_heads, [&](int64_t task, unsigned) {
      channel_statistics(p, plan, job.sequences[task / p.kv_heads], task % p.kv_heads, task, side);
    });
  parallel_for(job.threads, job.key_tile_count, [&](int64_t task, unsigned) {
    const Block& block = job.key_tiles[task];
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
    configure_tiles();
    Forward<Qk, Pv, format> forward{p, plan, side, signs, ForwardScratch<Qk, Pv>::carve(side, format == PFormat::u8, own), {}};
    forward.run(job.sequences[block.sequence], block);
    release_tiles();
  });
}

// Calls body with the engines and P format of a plan.
template <class Body>
auto with_engines(const ForwardPlan& plan, Body&& body) {
  const bool int8 = plan.qk == OCTET_I8;
  switch (plan.p) {
    case PFormat::u8: return body.template operator()<Int8, Int8, PFormat::u8>();
    case PFormat::e4m3:
      return int8 ? body.template operator()<Int8, Bf16, PFormat::e4m3>() : body.template operator()<Bf16, Bf16, PFormat::e4m3>();
    case PFormat::bf16: return body.template operator()<Bf16, Bf16, PFormat::bf16>();
    case PFormat::f16:
      return int8 ? body.template operator()<Int8, F32, PFormat::f16>() : body.template operator()<F32, F32, PFormat::f16>();
    default: return body.template operator()<F32, F32, PFormat::exact>();
  }
}

inline std::size_t forward_workspace(const Problem& p, unsigned threads) {
  const ForwardPlan plan = forward_plan(p);
  return with_engines(plan, [&]<class Qk, class Pv, PFormat format>() { return forward_workspace_as<Qk, Pv, format>(p, plan, threads); });
}

inline void forward(const Job& job) {
  const ForwardPlan plan = forward_plan(*job.problem);
  with_engines(plan, [&]<class Qk, class Pv, PFormat format>() { forward_as<Qk, Pv, format>(job, plan); });
}

}  // namespace octet::cpu::OCTET_ISA
