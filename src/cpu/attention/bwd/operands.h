// Operands of the backward pass: rows of q and do, tiles of k and v, as floats that hold the numbers of the precision's
// formats, and what the softmax needs to know of each row.
//
// A row of q or do that is not finite is kept as zeros, and its lse as NaN: whatever it reaches becomes NaN through p,
// and nothing else does, though 0 NaN is NaN. A row of k that is not finite is NaN in the logits and counts as zeros
// else.
#pragma once
#include "cpu/attention/bwd/dmask.h"
#include "cpu/attention/pack/seen.h"
#include "cpu/attention/softmax/softmax.h"
#include "cpu/gemm/split.h"

namespace octet::cpu::OCTET_ISA {

// Statistics of all seen tokens of one head, of q and do, or of k and v; only finite numbers count.
struct HeadStatistics {
  float largest;        // magnitude in q, or in k after smoothing
  float value_largest;  // in do, or in v
};

constexpr int64_t split_stride(int64_t n) { return words_of<Split>(n) + 16; }  // rows a power of two apart share sets

// In the workspace. Row r is token t of head h of batch element b: r = (b * heads + h) * tokens_q + t. Tiles are
// counted as in KeySide, heads by sequence first.
struct GradientOperands {
  Word *k_transposed, *v_transposed;  // [tile][words_of<Split>(dim)][kKeys]: B of q k^T and do v^T
  float *k_mean, *v_mean;             // [kv head][kMaxDim]
  float *tile_mean, *q_raw;           // with smooth_tiles: mean of the tile's k [tile][k_columns], q [row][k_columns]
  HeadStatistics *query_heads, *key_heads;
  bool *seen_keys, *seen_queries;  // with a mask tensor and scales: [kv head][tiles * kKeys], [row]
  int64_t tiles;                   // of a head of k and v, at most
  float *q, *do_dp;                // [row][columns], of q k^T and do v^T
  float *q_dk, *do_dv;             // [row][columns], of ds^T q and p^T do; those above where they are the same
  float*
      lse;  // [row], times log2(e), minus `row_bias`, for k minus its mean; +inf: the row sees nothing, not even a sink
  float* delta;       // [row], minus dlse
  float* sink;        // [row], with sinks: the sink's probability, with Delta::from_p until then its logit, as lse
  float* row_bias;    // [row], with a float mask or ALiBi: row_bias_of; the logits lack it
  float* mean_logit;  // [row], with smooth_k and a softcap: q.mean, which logits go without
  float* ds_sum;      // [row], with a softcap where a mean was taken from k: the sum of a row of ds
  float* lambda;      // [row], with gproj
  float* lambda_q;    // [row][k_columns], with gproj: -lambda q
  float* dq;          // [row][k_columns]
  int32_t* turn;      // [row]; at the first row of a block: the tile that adds to dq next
  MaskGradient dmask;
  int64_t k_columns, v_columns;
  Word* k_by_row;  // [tile][words_of<Split>(kKeys)][k_columns]: B of ds k; without tiles in panels of kPanelColumns
};

// Returns whether dq = ds k takes k minus a mean.
inline bool centred(const BackwardNumerics& numerics) { return numerics.smooth_k || numerics.smooth_k_dq; }

// Returns whether tokens have scales or means, so that some could reach others.
inline bool has_scales(const BackwardNumerics& numerics) {
  for (const Rounding& r : {numerics.q, numerics.k, numerics.v, numerics.do_dp, numerics.do_dv})
    if (r.group) return true;
  return centred(numerics);
}

inline GradientOperands allocate_gradient_operands(const Problem& p, const BackwardNumerics& numerics,
                                                   WorkspaceAllocator& workspace) {
  GradientOperands w{};
  w.tiles = key_tiles_bound(p);
  const int64_t tiles = w.tiles * p.kv_heads;
  const int64_t sequences = p.packed() ? p.cu_seqlens_q.shape[3] - 1 : p.batch;
  const int64_t rows = p.batch * p.heads * p.tokens_q;
  w.k_columns = padded_columns(p.dim);
  w.v_columns = padded_columns(p.dim_v);
  w.k_transposed = workspace.take<Word>(tiles * words_of<Split>(p.dim) * kKeys);
  w.v_transposed = workspace.take<Word>(tiles * words_of<Split>(p.dim_v) * kKeys);
  w.k_mean = workspace.take<float>(sequences * p.kv_heads * kMaxDim);
  w.v_mean = numerics.smooth_v ? workspace.take<float>(sequences * p.kv_heads * kMaxDim) : nullptr;
  w.query_heads = workspace.take<HeadStatistics>(sequences * p.heads);
  w.key_heads = workspace.take<HeadStatistics>(sequences * p.kv_heads);
  w.q = workspace.take<float>(rows * w.k_columns);
  w.q_dk = numerics.f16_q_dk ? workspace.take<float>(rows * w.k_columns) : w.q;
  w.do_dp = workspace.take<float>(rows * w.v_columns);
  w.do_dv = numerics.do_dv == numerics.do_dp ? w.do_dp : workspace.take<float>(rows * w.v_columns);
  w.k_by_row = workspace.take<Word>(tiles * words_of<Split>(kKeys) * w.k_columns);
  w.lse = workspace.take<float>(rows);
  w.delta = workspace.take<float>(rows);
  w.sink = p.sinks.present() ? workspace.take<float>(rows) : nullptr;
  w.row_bias = has_row_bias(p) ? workspace.take<float>(rows) : nullptr;
  w.mean_logit = numerics.smooth_k && p.softcap != 0.f ? workspace.take<float>(rows) : nullptr;
  w.ds_sum = centred(numerics) && p.softcap != 0.f ? workspace.take<float>(rows) : nullptr;
  w.q_raw = numerics.smooth_tiles ? workspace.take<float>(rows * w.k_columns) : nullptr;
  w.tile_mean = numerics.smooth_tiles ? workspace.take<float>(tiles * w.k_columns) : nullptr;
  const bool lists = p.mask.present() && has_scales(numerics);
  w.seen_keys = lists ? workspace.take<bool>(tiles * kKeys) : nullptr;
  w.seen_queries = lists ? workspace.take<bool>(rows) : nullptr;
  w.lambda = numerics.gproj ? workspace.take<float>(rows) : nullptr;
  w.lambda_q = numerics.gproj ? workspace.take<float>(rows * w.k_columns) : nullptr;
  w.dq = workspace.take<float>(rows * w.k_columns);
  w.turn = workspace.take<int32_t>(rows);
  w.dmask = MaskGradient::allocate(p, workspace);
  return w;
}

inline int64_t row_index(const Problem& p, const Sequence& seq, int64_t h, int64_t token) {
  return (seq.batch * p.heads + h) * p.tokens_q + seq.q_first + token;
}

// `first_tile`: of the sequence.
inline bool* listed_keys(const GradientOperands& w, int64_t g, int64_t first_tile) {
  return w.seen_keys ? w.seen_keys + (g * w.tiles + first_tile) * kKeys : nullptr;
}
inline SeenTokens seen_keys(const Problem& p, const Sequence& seq, int64_t g, int64_t first_tile,
                            const GradientOperands& w) {
  return {keys_of_sequence(p, seq), listed_keys(w, g, first_tile)};
}
inline bool seen_query(const Problem& p, const Sequence& seq, int64_t h, int64_t i, const GradientOperands& w) {
  return w.seen_queries ? w.seen_queries[row_index(p, seq, h, i)] : sees_a_key(p, seq, h, i);
}

// The key tiles that a block of queries sees.
inline KeyRange tiles_of(const Problem& p, const Sequence& seq, int64_t token, int64_t rows) {
  const KeyRange a = p.keys_of(token, seq.q_tokens, seq.k_tokens),
                 b = p.keys_of(token + rows - 1, seq.q_tokens, seq.k_tokens);
  const int64_t first = std::min(a.first, b.first), last = std::max(a.last, b.last);
  return first < last ? KeyRange{first / kKeys, (last + kKeys - 1) / kKeys} : KeyRange{0, 0};
}

// The gradient of a row's lse; `token`: of the sequence.
inline float dlse_of(const Problem& p, const Sequence& seq, int64_t h, int64_t token) {
  return p.dlse.present() ? *p.dlse.at<float>(seq.batch, h, seq.q_first + token) : 0.f;
}

// The sum of a row of ds: as p sums to 1 with the sink, sum p (dp - delta + dlse) = dlse - p_sink (dlse - delta).
// Without sink and dlse it is exactly 0, so that a mean that was taken from k multiplies no rounding errors. That is
// the sum before the derivative of a softcap multiplies ds.
inline float row_sum_of_ds(const Problem& p, const GradientOperands& w, const Sequence& seq, int64_t h, int64_t token) {
  const int64_t r = row_index(p, seq, h, token);
  if (w.lse[r] == __builtin_inff()) return 0.f;
  const float of_sink = w.sink && w.sink[r] != 0.f ? w.sink[r] * w.delta[r] : 0.f;
  return dlse_of(p, seq, h, token) + of_sink;
}

}  // namespace octet::cpu::OCTET_ISA
