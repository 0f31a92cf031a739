// Preprocessing makes the operands, lse and delta of every tile of k and v and every block of queries, once.
#pragma once
#include <cmath>

#include "cpu/attention/bwd/rounding.h"
#include "cpu/attention/softmax/softmax.h"
#include "cpu/sinks.h"

namespace octet::cpu::OCTET_ISA {

// One tile of k and v.
inline void prepare_keys(const Problem& p, const BackwardNumerics& numerics, const Sequence& seq, const Block& block,
                         const GradientOperands& w) {
  const int64_t g = block.head, first = block.token, kc = w.k_columns, vc = w.v_columns;
  const int64_t side = block.sequence * p.kv_heads + g;
  const int64_t index = (block.first_tile + first / kKeys) * p.kv_heads + g;
  const int64_t valid = std::min(seq.k_tokens - first, kKeys);
  const HeadStatistics& head = w.key_heads[side];
  // Keys that no query sees become zeros.
  const SeenTokens all_seen = seen_keys(p, seq, g, block.first_tile, w);
  const auto seen = [&](int64_t r) { return !has_scales(numerics) || all_seen[first + r]; };
  alignas(64) float k[kKeys * kMaxDim], k_dq[kKeys * kMaxDim];
  bool finite[kKeys];
  load_numbers(p.k, seq.batch, g, seq.k_first + first, valid, kKeys, kc, k);
  for (int64_t r = 0; r < valid; ++r) {
    if (!seen(r)) zero(k + r * kc, kc);
    finite[r] = finite_row(k + r * kc, kc);
    if (!finite[r]) zero(k + r * kc, kc);
    if (numerics.smooth_k && seen(r)) subtract(k + r * kc, w.k_mean + side * kMaxDim, p.dim);
  }
  if (numerics.f16_q_dk) std::memcpy(k_dq, k, sizeof(float) * kKeys * kc);
  if (numerics.smooth_tiles) {
    float* mean = w.tile_mean + index * kc;
    mean_of_rows(k, valid, kc, seen, mean);
    for (int64_t r = 0; r < valid; ++r)
      if (seen(r)) subtract(k + r * kc, mean, kc);
  }
  if (numerics.hadamard) rotate_rows(k, valid, kc, p.dim);
  round_rows(numerics.k, numerics.k.group == kWholeHead ? head.largest : -1.f, k, valid, kc);
  for (int64_t r = 0; r < valid; ++r)  // beyond the range of 16 bits
    if (!finite_row(k + r * kc, kc)) finite[r] = false, zero(k + r * kc, kc);
  alignas(64) float transposed[kMaxDim * kKeys];
  transpose(k, kKeys, kc, p.dim, transposed);
  for (int64_t r = 0; r < valid; ++r)
    if (!finite[r])
      for (int64_t c = 0; c < p.dim; ++c) transposed[c * kKeys + r] = __builtin_nanf("");
  store_columns(transposed, p.dim, w.k_transposed + index * words_of<Split>(p.dim) * kKeys);
  float* const by_row = numerics.f16_q_dk ? k_dq : k;
  if (numerics.smooth_k_dq) {
    for (int64_t r = 0; r < valid; ++r)
      if (seen(r)) subtract(by_row + r * kc, w.k_mean + side * kMaxDim, p.dim);
    round_rows(kF16InAnyRange, -1.f, by_row, valid, kc);
  }
  store_rows(by_row, kc, w.k_by_row + index * words_of<Split>(kKeys) * kc);

  alignas(64) float v[kKeys * kMaxDim];
  load_numbers(p.v, seq.batch, g, seq.k_first + first, valid, kKeys, vc, v);
  for (int64_t r = 0; r < valid; ++r)
    if (!seen(r)) zero(v + r * vc, vc);
  for (int64_t r = 0; r < valid && numerics.smooth_v; ++r)
    if (seen(r)) subtract(v + r * vc, w.v_mean + side * kMaxDim, p.dim_v);
  round_rows(numerics.v, numerics.v.group == kWholeHead ? head.value_largest : -1.f, v, valid, vc);
  for (int64_t r = 0; r < valid && numerics.smooth_v; ++r)
    if (seen(r)) add(v + r * vc, w.v_mean + side * kMaxDim, p.dim_v);
  transpose(v, kKeys, vc, p.dim_v, transposed);
  store_columns(transposed, p.dim_v, w.v_transposed + index * words_of<Split>(p.dim_v) * kKeys);
}

// delta = do . o, in double: the sum is small where its terms are not.
inline float delta_of(const Problem& p, const BackwardNumerics& numerics, const Sequence& seq, int64_t h, int64_t token,
                      const float* do_) {
  alignas(64) float o[kMaxDim];
  load_row(p.o, seq.batch, h, token, o);
  if (numerics.delta == Delta::from_exact_o && p.o_residual.present())
    add_residual(p.o_residual, seq.batch, h, token, p.o.dtype, o);
  double sum[8] = {};
  for (int64_t c = 0; c < p.dim_v; c += 8)
    for (int64_t i = 0; i < 8; ++i) sum[i] += static_cast<double>(do_[c + i]) * o[c + i];
  return static_cast<float>(((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7])));
}

// One block of queries: rows, lse, delta; clears dq and gives the first tile its turn.
inline void prepare_queries(const Problem& p, const BackwardNumerics& numerics, const Sequence& seq, const Block& block,
                            const GradientOperands& w) {
  const int64_t h = block.head, token = block.token, kc = w.k_columns, vc = w.v_columns;
  const int64_t rows = std::min(seq.q_tokens - token, kQueries), first = row_index(p, seq, h, token);
  const float* mean = w.k_mean + (block.sequence * p.kv_heads + h / p.group()) * kMaxDim;
  const HeadStatistics& head = w.query_heads[block.sequence * p.heads + h];
  float *q = w.q + first * kc, *q_dk = w.q_dk + first * kc, *do_dp = w.do_dp + first * vc,
        *do_dv = w.do_dv + first * vc;
  load_numbers(p.q, seq.batch, h, seq.q_first + token, rows, rows, kc, q);
  load_numbers(p.do_, seq.batch, h, seq.q_first + token, rows, rows, vc, do_dp);
  // Queries that see no key become zeros.
  const auto seen = [&](int64_t i) { return !has_scales(numerics) || seen_query(p, seq, h, token + i, w); };
  const double sink = sink_of(p, seq.batch, h);
  bool do_finite[kQueries];
  for (int64_t i = 0; i < rows; ++i) {
    if (!seen(i)) zero(q + i * kc, kc), zero(do_dp + i * vc, vc);
    const float saved = *p.lse.at<float>(seq.batch, h, seq.q_first + token + i);
    double lse = saved == kMinusInfinity ? __builtin_inf() : saved, moved = 0;
    if (w.row_bias) moved = w.row_bias[first + i] = row_bias_of(p, seq, h, token + i);
    if (w.mean_logit)
      w.mean_logit[first + i] = static_cast<float>(dot_in_double(q + i * kc, mean, p.dim));
    else if (numerics.smooth_k)
      for (int64_t c = 0; c < p.dim; ++c) moved += static_cast<double>(p.scale) * q[i * kc + c] * mean[c];
    if (w.ds_sum) w.ds_sum[first + i] = 0.f;
    lse -= moved;
    if (w.sink)
      w.sink[first + i] = static_cast<float>(numerics.delta == Delta::from_p
                                                 ? std::min((sink - moved) * 1.44269504088896340736, 0x1p100)
                                                 : probability_of(sink, saved));
    do_finite[i] = finite_row(do_dp + i * vc, vc);
    if (!finite_row(q + i * kc, kc) || !do_finite[i]) {
      zero(q + i * kc, kc);
      zero(do_dp + i * vc, vc);
      lse = __builtin_nan("");
    }
    w.lse[first + i] = static_cast<float>(lse * 1.44269504088896340736);
  }
  if (do_dv != do_dp) {
    std::memcpy(do_dv, do_dp, sizeof(float) * rows * vc);
    round_rows(numerics.do_dv, shared_amax(p, numerics.do_dv, p.do_, seq, h, token, head.value_largest, w), do_dv, rows,
               vc);
  }
  if (w.q_raw) std::memcpy(w.q_raw + first * kc, q, sizeof(float) * rows * kc);
  if (q_dk != q) {
    std::memcpy(q_dk, q, sizeof(float) * rows * kc);
    round_rows(kF16InAnyRange, -1.f, q_dk, rows, kc);
  }
  if (numerics.hadamard) rotate_rows(q, rows, kc, p.dim);
  round_rows(numerics.q, shared_amax(p, numerics.q, p.q, seq, h, token, head.largest, w), q, rows, kc);
  round_rows(numerics.do_dp, shared_amax(p, numerics.do_dp, p.do_, seq, h, token, head.value_largest, w), do_dp, rows,
             vc);
  for (int64_t i = 0; i < rows; ++i)  // beyond the range of 16 bits
    if (!finite_row(q + i * kc, kc) || !finite_row(q_dk + i * kc, kc) || !finite_row(do_dp + i * vc, vc) ||
        !finite_row(do_dv + i * vc, vc)) {
      zero(q + i * kc, kc);
      zero(q_dk + i * kc, kc);
      zero(do_dp + i * vc, vc);
      zero(do_dv + i * vc, vc);
      w.lse[first + i] = __builtin_nanf("");
    }
  for (int64_t i = 0; i < rows; ++i) {
    float& delta = w.delta[first + i] = do_finite[i] ? 0.f : __builtin_nanf("");
    if (w.lse[first + i] != __builtin_inff() && numerics.delta != Delta::from_p)
      delta += delta_of(p, numerics, seq, h, seq.q_first + token + i, do_dp + i * vc);
    delta -= dlse_of(p, seq, h, token + i);
  }
  zero(w.dq + first * kc, rows * kc);
  w.turn[first] = static_cast<int32_t>(tiles_of(p, seq, token, rows).first);
}

}  // namespace octet::cpu::OCTET_ISA
