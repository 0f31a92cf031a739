// Operands of the backward pass: the rows of q and do, the tiles of k and v, as floats that hold the numbers of the
// precision's formats, and what the softmax needs of each row.
//
// A row of q or do that is not finite is stored as zeros, and its lse as NaN: everything it reaches becomes NaN through
// p, and nothing else does. A key that is not finite reaches the logits of the queries that see it, so its row in the
// product ds k may be zeros too.
#pragma once
#include "cpu/kernels/softmax.h"
#include "cpu/parallel.h"

namespace octet::cpu::OCTET_ISA {

// In the workspace. Row r is token t of head h of batch element b: r = (b * heads + h) * tokens_q + t. Tiles are counted
// as in KeySide.
struct GradientOperands {
  float *k_transposed, *k, *v_transposed;  // [tile][dim][kKeys], [tile][kKeys][k_columns], [tile][dim_v][kKeys]
  float* k_step;                           // [tile][kKeys]
  float* k_mean;                           // [sequence * kv_heads][kMaxDim]
  float *q, *do_, *do_dv;                  // [row][columns]
  float *q_step, *do_step;                 // [row]
  float *lse;                              // [row], times log2(e), in the gauge of k; +inf: the row sees nothing
  float *delta;                            // [row]
  float *lambda;                           // [row]
  float* dq;                               // [row][k_columns]
  int32_t* turn;                           // [row]; at the first row of a block: the tile that adds to dq next
  int64_t k_columns, v_columns;
};

inline GradientOperands carve_gradient_operands(const Problem& p, Carver& carve) {
  GradientOperands w;
  const int64_t tiles = tiles_bound(p, p.tokens_k, kKeys) * p.kv_heads;
  const int64_t sides = (p.packed() ? p.cu_seqlens_q.shape[3] - 1 : p.batch) * p.kv_heads;
  const int64_t rows = p.batch * p.heads * p.tokens_q;
  w.k_columns = padded_columns(p.dim);
  w.v_columns = padded_columns(p.dim_v);
  w.k_transposed = carve.take<float>(tiles * p.dim * kKeys);
  w.k = carve.take<float>(tiles * kKeys * w.k_columns);
  w.v_transposed = carve.take<float>(tiles * p.dim_v * kKeys);
  w.k_step = carve.take<float>(tiles * kKeys);
  w.k_mean = carve.take<float>(sides * kMaxDim);
  w.q = carve.take<float>(rows * w.k_columns);
  w.do_ = carve.take<float>(rows * w.v_columns);
  w.do_dv = w.do_;
  w.q_step = carve.take<float>(rows);
  w.do_step = carve.take<float>(rows);
  w.lse = carve.take<float>(rows);
  w.delta = carve.take<float>(rows);
  w.lambda = carve.take<float>(rows);
  w.dq = carve.take<float>(rows * w.k_columns);
  w.turn = carve.take<int32_t>(rows);
  return w;
}

inline int64_t row_index(const Problem& p, const Sequence& seq, int64_t h, int64_t token) {
  return (seq.batch * p.heads + h) * p.tokens_q + seq.q_first + token;
}

// The key tiles that a block of queries sees.
inline KeyRange tiles_of(const Problem& p, const Sequence& seq, int64_t token, int64_t rows) {
  const KeyRange a = p.keys_of(token, seq.q_tokens, seq.k_tokens), b = p.keys_of(token + rows - 1, seq.q_tokens, seq.k_tokens);
  const int64_t first = std::min(a.first, b.first), last = std::max(a.last, b.last);
  return first < last ? KeyRange{first / kKeys, (last + kKeys - 1) / kKeys} : KeyRange{0, 0};
}

// [count][width] to [columns][count], a few cache lines of both at a time.
inline void transpose(const float* rows, int64_t count, int64_t width, int64_t columns, float* out) {
  for (int64_t r = 0; r < count; r += kLanes)
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t i = 0; i < kLanes; ++i) out[c * count + r + i] = rows[(r + i) * width + c];
}

inline void multiply(float* row, float factor, int64_t n) {
  for (int64_t c = 0; c < n; ++c) row[c] *= factor;
}

inline bool finite_row(const float* row, int64_t n) {
  const float a = row_amax(row, n);
  return a == a;
}

inline void prepare_key_tile(const Problem& p, const BackwardPlan& plan, const Sequence& seq, const Block& block, const Signs& signs,
                             const GradientOperands& w) {
  const int64_t g = block.head, first = block.token;
  const int64_t side = block.sequence * p.kv_heads + g;
  const int64_t index = (block.first_tile + first / kKeys) * p.kv_heads + g;
  const int64_t valid = std::min(seq.k_tokens - first, kKeys);
  float* k = w.k + index * kKeys * w.k_columns;
  float* steps = w.k_step + index * kKeys;
  for (int64_t r = 0; r < kKeys; ++r) steps[r] = 1.f;
  load_rows(p.k, seq.batch, g, seq.k_first + first, valid, kKeys, w.k_columns, k);
  if (p.k.quantization) {
    for (int64_t r = 0; r < valid; ++r) steps[r] = given_scale(p.k, seq.batch, g, seq.k_first + first + r);
  } else {
    for (int64_t r = 0; r < valid; ++r) {
      if (plan.logits.smooth_k) subtract(k + r * w.k_columns, w.k_mean + side * kMaxDim, p.dim);
      if (plan.logits.hadamard) hadamard(k + r * w.k_columns, signs.sign, p.dim);
    }
    quantize_rows(plan.logits.qk, plan.logits.k_group, k, valid, w.k_columns, steps);
  }
  if (p.k.quantization || plan.logits.k_group)
    for (int64_t r = 0; r < valid; ++r) multiply(k + r * w.k_columns, steps[r], w.k_columns);
  transpose(k, kKeys, w.k_columns, p.dim, w.k_transposed + index * p.dim * kKeys);
  for (int64_t r = 0; r < valid; ++r)
    if (!finite_row(k + r * w.k_columns, w.k_columns)) std::memset(k + r * w.k_columns, 0, sizeof(float) * w.k_columns);

  alignas(64) float v[kKeys * kMaxDim];
  load_rows(p.v, seq.batch, g, seq.k_first + first, valid, kKeys, w.v_columns, v);
  if (p.v.quantization)
    for (int64_t r = 0; r < valid; ++r) multiply(v + r * w.v_columns, given_scale(p.v, seq.batch, g, seq.k_first + first + r), w.v_columns);
  quantize_rows(plan.dp, 0, v, valid, w.v_columns, nullptr);
  transpose(v, kKeys, w.v_columns, p.dim_v, w.v_transposed + index * p.dim_v * kKeys);
}

// delta = do . o, in double: o and do are large where their product is small.
inline float delta_of(const Problem& p, const BackwardPlan& plan, const Sequence& seq, int64_t h, int64_t token, const float* do_) {
  alignas(64) float o[kMaxDim], residual[kMaxDim];
  load_row(p.o, seq.batch, h, token, o);
  if (plan.delta == Delta::from_exact_o && p.o_residual.present()) {
    load_row(p.o_residual, seq.batch, h, token, residual);
    for (int64_t c = 0; c < p.dim_v; ++c) o[c] += residual[c];
  }
  double sum[8] = {};
  for (int64_t c = 0; c < p.dim_v; c += 8)
    for (int64_t i = 0; i < 8; ++i) sum[i] += static_cast<double>(do_[c + i]) * o[c + i];
  return static_cast<float>(((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7])));
}

// The rows of one block of queries: q, do, lse, delta; clears dq and gives the first tile its turn.
inline void prepare_queries(const Problem& p, const BackwardPlan& plan, const Sequence& seq, const Block& block, const Signs& signs,
                            const GradientOperands& w) {
  const int64_t h = block.head, token = block.token, side = block.sequence * p.kv_heads + h / p.group();
  const int64_t rows = std::min(seq.q_tokens - token, kQueries), first = row_index(p, seq, h, token);
  alignas(64) Word codes[kQueries * kMaxDim];
  float steps[kQueries];
  pack_queries<F32>(p, plan.logits, seq, h, token, rows, signs, codes, w.k_columns, steps);
  std::memcpy(w.q + first * w.k_columns, codes, sizeof(float) * rows * w.k_columns);
  load_rows(p.do_, seq.batch, h, seq.q_first + token, rows, rows, w.v_columns, w.do_ + first * w.v_columns);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t r = first + i, at = seq.q_first + token + i;
    float *q = w.q + r * w.k_columns, *do_ = w.do_ + r * w.v_columns;
    if (p.q.quantization || plan.logits.q_group) multiply(q, steps[i], w.k_columns);
    w.q_step[r] = steps[i];
    double lse = *p.lse.at<float>(seq.batch, h, at);
    w.delta[r] = delta_of(p, plan, seq, h, at, do_);
    if (lse == kMinusInfinity) {
      lse = __builtin_inf();
      w.delta[r] = 0.f;
    } else {
      if (plan.logits.smooth_k) lse -= p.scale * dot_with_mean(p, seq, h, at, signs, w.k_mean + side * kMaxDim);
      if (!finite_row(q, w.k_columns) || !finite_row(do_, w.v_columns)) lse = __builtin_nan("");
    }
    w.lse[r] = static_cast<float>(lse * 1.44269504088896340736);
    if (!(w.lse[r] < __builtin_inff())) {
      std::memset(q, 0, sizeof(float) * w.k_columns);
      std::memset(do_, 0, sizeof(float) * w.v_columns);
    }
  }
  std::memset(w.dq + first * w.k_columns, 0, sizeof(float) * rows * w.k_columns);
  w.turn[first] = static_cast<int32_t>(tiles_of(p, seq, token, rows).first);
}

}  // namespace octet::cpu::OCTET_ISA
