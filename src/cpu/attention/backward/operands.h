// Operands of the backward pass: rows of q and do, tiles of k and v, as floats that hold the numbers of the precision's
// formats, and what the softmax needs to know of each row.
//
// A row of q or do that is not finite is kept as zeros, and its lse as NaN: whatever it reaches becomes NaN through p,
// and nothing else does, though 0 NaN is NaN. A row of k that is not finite is NaN in the logits and counts as zeros
// else.
#pragma once
#include <cmath>

#include "cpu/attention/softmax/softmax.h"
#include "cpu/sinks.h"

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
  float* k_amax;                      // [tile][kKeys]
  float* k_mean;                      // [kv head][kMaxDim]
  float *k_smooth, *q_raw;  // with smooth_blocks: k minus tile means [tile][kKeys][k_columns], q [row][k_columns]
  float* q_mean;            // with smooth_blocks: [block of queries][k_columns], see block_mean
  float *tile_mean,
      *tile_offset;  // with smooth_blocks: [tile][k_columns], mean of the tile's k; minus that of all k
  HeadStatistics *query_heads, *key_heads;
  bool *seen_keys, *seen_queries;  // with a mask tensor and scales: [kv head][tiles * kKeys], [row]
  int64_t tiles;                   // of a head of k and v, at most
  float *q, *do_dp, *do_dv;        // [row][columns]
  float *q_amax, *do_amax;         // [row]
  float* lse;    // [row], times log2(e), less `gauge`, for k less its mean; +inf: the row sees nothing, not even a sink
  float* delta;  // [row], minus dlse
  float* sink;   // [row], with sinks: the sink's weight, with Delta::from_p until then its logit, as lse
  float* gauge;  // [row], with a float mask: mask_gauge, which logits go without
  float* lambda;    // [row], with gproj
  float* lambda_q;  // [row][k_columns], with gproj: -lambda q
  float* dq;        // [row][k_columns]
  int32_t* turn;    // [row]; at the first row of a block: the tile that adds to dq next
  int64_t k_columns, v_columns;
  Word* k_by_row;  // [tile][words_of<Split>(kKeys)][k_columns]: B of ds k; without tiles in panels of kPanelColumns
};

// Returns whether tokens have scales or means, so that some could reach others.
inline bool has_scales(const BackwardPlan& plan) {
  for (const Rounding& r : {plan.q, plan.k, plan.v, plan.do_dp, plan.do_dv})
    if (r.group) return true;
  return plan.smooth_k || plan.smooth_k_dq || plan.smooth_blocks;
}

inline GradientOperands allocate_gradient_operands(const Problem& p, const BackwardPlan& plan,
                                                   WorkspaceAllocator& workspace) {
  GradientOperands w{};
  w.tiles = tiles_bound(p, p.tokens_k, kKeys);
  const int64_t tiles = w.tiles * p.kv_heads;
  const int64_t sequences = p.packed() ? p.cu_seqlens_q.shape[3] - 1 : p.batch;
  const int64_t rows = p.batch * p.heads * p.tokens_q;
  w.k_columns = padded_columns(p.dim);
  w.v_columns = padded_columns(p.dim_v);
  w.k_transposed = workspace.take<Word>(tiles * words_of<Split>(p.dim) * kKeys);
  w.v_transposed = workspace.take<Word>(tiles * words_of<Split>(p.dim_v) * kKeys);
  w.k_amax = workspace.take<float>(tiles * kKeys);
  w.k_mean = workspace.take<float>(sequences * p.kv_heads * kMaxDim);
  w.query_heads = workspace.take<HeadStatistics>(sequences * p.heads);
  w.key_heads = workspace.take<HeadStatistics>(sequences * p.kv_heads);
  w.q = workspace.take<float>(rows * w.k_columns);
  w.do_dp = workspace.take<float>(rows * w.v_columns);
  w.do_dv = plan.do_dv == plan.do_dp ? w.do_dp : workspace.take<float>(rows * w.v_columns);
  w.k_by_row = workspace.take<Word>(tiles * words_of<Split>(kKeys) * w.k_columns);
  w.q_amax = workspace.take<float>(rows);
  w.do_amax = workspace.take<float>(rows);
  w.lse = workspace.take<float>(rows);
  w.delta = workspace.take<float>(rows);
  w.sink = p.sinks.present() ? workspace.take<float>(rows) : nullptr;
  w.gauge = p.mask.present() && p.mask.dtype != OCTET_BOOL ? workspace.take<float>(rows) : nullptr;
  w.k_smooth = plan.smooth_blocks ? workspace.take<float>(tiles * kKeys * w.k_columns) : nullptr;
  w.q_raw = plan.smooth_blocks ? workspace.take<float>(rows * w.k_columns) : nullptr;
  w.q_mean = plan.smooth_blocks ? workspace.take<float>(tiles_bound(p, p.tokens_q, kQueries) * p.heads * w.k_columns)
                                : nullptr;
  w.tile_mean = plan.smooth_blocks ? workspace.take<float>(tiles * w.k_columns) : nullptr;
  w.tile_offset = plan.smooth_blocks ? workspace.take<float>(tiles * w.k_columns) : nullptr;
  const bool lists = p.mask.present() && has_scales(plan);
  w.seen_keys = lists ? workspace.take<bool>(tiles * kKeys) : nullptr;
  w.seen_queries = lists ? workspace.take<bool>(rows) : nullptr;
  w.lambda = plan.gproj ? workspace.take<float>(rows) : nullptr;
  w.lambda_q = plan.gproj ? workspace.take<float>(rows * w.k_columns) : nullptr;
  w.dq = workspace.take<float>(rows * w.k_columns);
  w.turn = workspace.take<int32_t>(rows);
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
  return {keys_in_reach(p, seq), listed_keys(w, g, first_tile)};
}
inline bool seen_query(const Problem& p, const Sequence& seq, int64_t h, int64_t i, const GradientOperands& w) {
  return w.seen_queries ? w.seen_queries[row_index(p, seq, h, i)] : sees_a_key(p, seq, h, i);
}

// Returns the place of the mean of the block of queries that `token` is in. Each sequence begins a block.
inline float* block_mean(const Problem& p, const Sequence& seq, int64_t sequence, int64_t h, int64_t token,
                         const GradientOperands& w) {
  const int64_t of_head = tiles_bound(p, p.tokens_q, kQueries) / (p.packed() ? 1 : p.batch);
  const int64_t block = (seq.q_first + token) / kQueries + (p.packed() ? sequence : 0);
  return w.q_mean + ((seq.batch * p.heads + h) * of_head + block) * w.k_columns;
}

// The key tiles that a block of queries sees.
inline KeyRange tiles_of(const Problem& p, const Sequence& seq, int64_t token, int64_t rows) {
  const KeyRange a = p.keys_of(token, seq.q_tokens, seq.k_tokens),
                 b = p.keys_of(token + rows - 1, seq.q_tokens, seq.k_tokens);
  const int64_t first = std::min(a.first, b.first), last = std::max(a.last, b.last);
  return first < last ? KeyRange{first / kKeys, (last + kKeys - 1) / kKeys} : KeyRange{0, 0};
}

inline void multiply(float* row, float factor, int64_t n) {
  for (int64_t c = 0; c < n; ++c) row[c] *= factor;
}

inline bool finite_row(const float* row, int64_t n) {
  Vf poison{};
  for (int64_t c = 0; c < n; c += kLanes) poison += load(row + c) * 0.f;
  return reduce_add(poison) == 0.f;
}

inline void zero(float* x, int64_t n) { std::memset(x, 0, sizeof(float) * n); }

// Rounds rows to numbers of a format. `shared`: the largest magnitude of their group if it reaches beyond them, else
// negative.
inline void round_rows(const Rounding& how, float shared, float* rows, int64_t count, int64_t width) {
  if (how.dtype == OCTET_F32) return;
  if (how.dtype == OCTET_F16 && how.group) {
    for (int64_t i = 0; i < count * width; i += kLanes) store(rows + i, round_11_bits(load(rows + i)));
    return;
  }
  const int64_t group = how.group && shared < 0.f ? how.group : count;
  for (int64_t first = 0; first < count; first += group) {
    const int64_t last = std::min(first + group, count);
    Step step{1.f, 1.f};
    if (how.group) {
      float largest = shared;
      if (shared < 0.f)
        for (int64_t r = first; r < last; ++r) largest = std::max(largest, finite_amax(rows + r * width, width));
      step = step_of(largest, largest_code(how.dtype));
    }
    for (int64_t r = first; r < last; ++r) {
      round_row_to(how.dtype, step.inverse, rows + r * width, width);
      if (how.group) multiply(rows + r * width, step.step, width);
    }
  }
}

// `shared` of round_rows for a block of queries from `token` on.
inline float shared_amax(const Problem& p, const Rounding& how, const View& t, const Sequence& seq, int64_t h,
                         int64_t token, float head, const GradientOperands& w) {
  if (how.group == kWholeHead) return head;
  if (how.group <= kQueries) return -1.f;
  alignas(64) float row[kMaxDim];
  float largest = 0.f;
  const int64_t first = token / how.group * how.group, width = padded_columns(t.shape[3]);
  for (int64_t i = first; i < std::min(first + how.group, seq.q_tokens); ++i) {
    if (!seen_query(p, seq, h, i, w)) continue;
    load_numbers(t, seq.batch, h, seq.q_first + i, 1, 1, width, row);
    largest = std::max(largest, finite_row(row, width) ? finite_amax(row, width) : 0.f);
  }
  return largest;
}

// One pass over the seen tokens of a head of x (q or k, minus `mean` if there is one) and y (do or v).
template <class Seen>
HeadStatistics head_statistics(const View& x, const View& y, int64_t b, int64_t h, int64_t first, int64_t tokens,
                               const Seen& seen, const float* mean) {
  alignas(64) float row[kMaxDim];
  HeadStatistics s{};
  const int64_t x_width = padded_columns(x.shape[3]), y_width = padded_columns(y.shape[3]);
  for (int64_t t = first; t < first + tokens; ++t) {
    if (!seen(t - first)) continue;
    load_numbers(x, b, h, t, 1, 1, x_width, row);
    if (!finite_row(row, x_width)) zero(row, x_width);
    if (mean) subtract(row, mean, x.shape[3]);
    s.largest = std::max(s.largest, finite_amax(row, x_width));
    load_numbers(y, b, h, t, 1, 1, y_width, row);
    if (!finite_row(row, y_width)) continue;
    s.value_largest = std::max(s.value_largest, finite_amax(row, y_width));
  }
  return s;
}

// Mean of k over the seen tokens of a head, in token order, in double, rounded once.
inline void mean_of_keys(const Problem& p, const Sequence& seq, int64_t g, const SeenTokens& seen, float* mean) {
  alignas(64) float row[kMaxDim];
  double sum[kMaxDim] = {};
  const float limit = limit_of(p.k, seq, g, seen);
  for (int64_t j = seen.range.first; j < seen.range.last; ++j) {
    if (!seen[j]) continue;
    load_numbers(p.k, seq.batch, g, seq.k_first + j, 1, 1, p.dim, row);
    for (int64_t c = 0; c < p.dim; ++c)
      if (__builtin_fabsf(row[c]) < limit) sum[c] += row[c];
  }
  for (int64_t c = 0; c < p.dim; ++c)
    mean[c] = static_cast<float>(sum[c] / static_cast<double>(std::max<int64_t>(seen.count(), 1)));
}

// Writes the mean of the seen rows among at most kSampledTokens, summed in double and rounded once.
template <class Seen>
void mean_of_rows(const float* rows, int64_t count, int64_t width, const Seen& seen, float* mean) {
  double sum[kMaxDim] = {};
  float largest[kSampledTokens];
  int64_t tokens = 0;
  for (int64_t r = 0; r < count; ++r)
    if (seen(r)) largest[tokens++] = finite_amax(rows + r * width, width);
  const float limit = mean_limit(largest, tokens);
  for (int64_t r = 0; r < count; ++r)
    for (int64_t c = 0; c < width && seen(r); ++c)
      if (const float x = rows[r * width + c]; __builtin_fabsf(x) < limit) sum[c] += x;
  for (int64_t c = 0; c < width; ++c)
    mean[c] = static_cast<float>(sum[c] / static_cast<double>(std::max<int64_t>(tokens, 1)));
}

inline void rotate_rows(float* rows, int64_t count, int64_t width, int64_t dim) {
  const Signs signs(kHadamardSeed, dim);
  for (int64_t r = 0; r < count; ++r) hadamard_row(rows + r * width, signs.sign, dim);
}

inline void rotate_back(float* row, int64_t dim) {
  const Signs signs(kHadamardSeed, dim);
  hadamard_inverse(row, signs.sign, dim);
}

// [kKeys][columns] numbers as B of ds k.
inline void store_rows(const float* rows, int64_t columns, Word* out) {
#ifdef __AMX_BF16__
  split_columns(rows, kKeys, kKeys, columns, out);
#else
  for (int64_t c = 0, width; c < columns; c += width) {
    width = std::min(kPanelColumns, columns - c);
    for (int64_t r = 0; r < kKeys; ++r)
      std::memcpy(out + c * kKeys + r * width, rows + r * columns + c, sizeof(float) * width);
  }
#endif
}

// [dim][kKeys] numbers as B of q k^T and do v^T.
inline void store_columns(const float* columns, int64_t dim, Word* out) {
#ifdef __AMX_BF16__
  split_columns(columns, dim, dim, kKeys, out);
#else
  std::memcpy(out, columns, sizeof(float) * dim * kKeys);
#endif
}

// One tile of k and v.
inline void prepare_keys(const Problem& p, const BackwardPlan& plan, const Sequence& seq, const Block& block,
                         const GradientOperands& w) {
  const int64_t g = block.head, first = block.token, kc = w.k_columns, vc = w.v_columns;
  const int64_t side = block.sequence * p.kv_heads + g;
  const int64_t index = (block.first_tile + first / kKeys) * p.kv_heads + g;
  const int64_t valid = std::min(seq.k_tokens - first, kKeys);
  const HeadStatistics& head = w.key_heads[side];
  // Keys that no query sees become zeros.
  const SeenTokens all_seen = seen_keys(p, seq, g, block.first_tile, w);
  const auto seen = [&](int64_t r) { return !has_scales(plan) || all_seen[first + r]; };
  alignas(64) float k[kKeys * kMaxDim];
  bool finite[kKeys];
  load_numbers(p.k, seq.batch, g, seq.k_first + first, valid, kKeys, kc, k);
  for (int64_t r = 0; r < valid; ++r) {
    if (!seen(r)) zero(k + r * kc, kc);
    finite[r] = finite_row(k + r * kc, kc);
    if (!finite[r]) zero(k + r * kc, kc);
    if (plan.smooth_k && seen(r)) subtract(k + r * kc, w.k_mean + side * kMaxDim, p.dim);
  }
  float* mean = plan.smooth_blocks ? w.tile_mean + index * kc : nullptr;
  if (plan.smooth_blocks) {
    mean_of_rows(k, valid, kc, seen, mean);
    if (plan.hadamard) rotate_rows(mean, 1, kc, p.dim);
  }
  if (plan.hadamard) rotate_rows(k, valid, kc, p.dim);
  if (plan.smooth_blocks) {
    for (int64_t r = 0; r < valid; ++r)
      if (seen(r)) subtract(k + r * kc, mean, kc);
    std::memcpy(w.k_smooth + index * kKeys * kc, k, sizeof(float) * kKeys * kc);
    // dq = ds k is given back the mean of the tile minus that of all keys; store_dq sees to the latter.
    alignas(64) float all[kMaxDim] = {};
    std::memcpy(all, w.k_mean + side * kMaxDim, sizeof(float) * p.dim);
    if (plan.hadamard) rotate_rows(all, 1, kc, p.dim);
    for (int64_t c = 0; c < kc; ++c) w.tile_offset[index * kc + c] = mean[c] - all[c];
  }
  round_rows(plan.k, plan.k.group == kWholeHead ? head.largest : -1.f, k, valid, kc);
  for (int64_t r = 0; r < valid; ++r)  // beyond the range of 16 bits
    if (!finite_row(k + r * kc, kc)) finite[r] = false, zero(k + r * kc, kc);
  for (int64_t r = 0; r < kKeys; ++r) w.k_amax[index * kKeys + r] = finite_amax(k + r * kc, kc);
  alignas(64) float transposed[kMaxDim * kKeys];
  transpose(k, kKeys, kc, p.dim, transposed);
  for (int64_t r = 0; r < valid; ++r)
    if (!finite[r])
      for (int64_t c = 0; c < p.dim; ++c) transposed[c * kKeys + r] = __builtin_nanf("");
  store_columns(transposed, p.dim, w.k_transposed + index * words_of<Split>(p.dim) * kKeys);
  if (plan.smooth_k_dq) {
    for (int64_t r = 0; r < valid; ++r)
      if (seen(r)) subtract(k + r * kc, w.k_mean + side * kMaxDim, p.dim);
    round_rows({OCTET_F16, 1}, -1.f, k, valid, kc);
  }
  store_rows(k, kc, w.k_by_row + index * words_of<Split>(kKeys) * kc);

  alignas(64) float v[kKeys * kMaxDim];
  load_numbers(p.v, seq.batch, g, seq.k_first + first, valid, kKeys, vc, v);
  for (int64_t r = 0; r < valid; ++r)
    if (!seen(r)) zero(v + r * vc, vc);
  round_rows(plan.v, plan.v.group == kWholeHead ? head.value_largest : -1.f, v, valid, vc);
  transpose(v, kKeys, vc, p.dim_v, transposed);
  store_columns(transposed, p.dim_v, w.v_transposed + index * words_of<Split>(p.dim_v) * kKeys);
}

// delta = do . o, in double: the sum is small where its terms are not.
inline float delta_of(const Problem& p, const BackwardPlan& plan, const Sequence& seq, int64_t h, int64_t token,
                      const float* do_) {
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

// The gradient of a row's lse; `token`: of the sequence.
inline float dlse_of(const Problem& p, const Sequence& seq, int64_t h, int64_t token) {
  return p.dlse.present() ? *p.dlse.at<float>(seq.batch, h, seq.q_first + token) : 0.f;
}

// The sum of a row of ds: as p sums to 1 with the sink, sum p (dp - delta + dlse) = dlse - p_sink (dlse - delta).
// Without sink and dlse it is exactly 0, so that a mean that was taken from k multiplies no rounding errors.
inline float row_sum_of_ds(const Problem& p, const GradientOperands& w, const Sequence& seq, int64_t h, int64_t token) {
  const int64_t r = row_index(p, seq, h, token);
  if (w.lse[r] == __builtin_inff()) return 0.f;
  const float of_sink = w.sink && w.sink[r] != 0.f ? w.sink[r] * w.delta[r] : 0.f;
  return dlse_of(p, seq, h, token) + of_sink;
}

// One block of queries: rows, lse, delta; clears dq and gives the first tile its turn.
inline void prepare_queries(const Problem& p, const BackwardPlan& plan, const Sequence& seq, const Block& block,
                            const GradientOperands& w) {
  const int64_t h = block.head, token = block.token, kc = w.k_columns, vc = w.v_columns;
  const int64_t rows = std::min(seq.q_tokens - token, kQueries), first = row_index(p, seq, h, token);
  const float* mean = w.k_mean + (block.sequence * p.kv_heads + h / p.group()) * kMaxDim;
  const HeadStatistics& head = w.query_heads[block.sequence * p.heads + h];
  float *q = w.q + first * kc, *do_dp = w.do_dp + first * vc, *do_dv = w.do_dv + first * vc;
  load_numbers(p.q, seq.batch, h, seq.q_first + token, rows, rows, kc, q);
  load_numbers(p.do_, seq.batch, h, seq.q_first + token, rows, rows, vc, do_dp);
  // Queries that see no key become zeros.
  const auto seen = [&](int64_t i) { return !has_scales(plan) || seen_query(p, seq, h, token + i, w); };
  const double sink = sink_of(p, seq.batch, h);
  bool do_finite[kQueries];
  for (int64_t i = 0; i < rows; ++i) {
    if (!seen(i)) zero(q + i * kc, kc), zero(do_dp + i * vc, vc);
    const float saved = *p.lse.at<float>(seq.batch, h, seq.q_first + token + i);
    double lse = saved == kMinusInfinity ? __builtin_inf() : saved, moved = 0;
    if (w.gauge) moved = w.gauge[first + i] = mask_gauge(p, seq, h, token + i);
    if (plan.smooth_k)
      for (int64_t c = 0; c < p.dim; ++c) moved += static_cast<double>(p.scale) * q[i * kc + c] * mean[c];
    lse -= moved;
    if (w.sink)
      w.sink[first + i] =
          static_cast<float>(plan.delta == Delta::from_p ? std::min((sink - moved) * 1.44269504088896340736, 0x1p100)
                                                         : weight_of(sink, saved));
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
    round_rows(plan.do_dv, shared_amax(p, plan.do_dv, p.do_, seq, h, token, head.value_largest, w), do_dv, rows, vc);
  }
  float* mean_q = plan.smooth_blocks ? block_mean(p, seq, block.sequence, h, token, w) : nullptr;
  if (plan.smooth_blocks) {
    mean_of_rows(q, rows, kc, seen, mean_q);
    if (plan.hadamard) rotate_rows(mean_q, 1, kc, p.dim);
  }
  if (plan.hadamard) rotate_rows(q, rows, kc, p.dim);
  if (plan.smooth_blocks) {
    std::memcpy(w.q_raw + first * kc, q, sizeof(float) * rows * kc);
    for (int64_t i = 0; i < rows; ++i)
      if (seen(i)) subtract(q + i * kc, mean_q, kc);
  }
  round_rows(plan.q, shared_amax(p, plan.q, p.q, seq, h, token, head.largest, w), q, rows, kc);
  round_rows(plan.do_dp, shared_amax(p, plan.do_dp, p.do_, seq, h, token, head.value_largest, w), do_dp, rows, vc);
  for (int64_t i = 0; i < rows; ++i)  // beyond the range of 16 bits
    if (!finite_row(q + i * kc, kc) || !finite_row(do_dp + i * vc, vc)) {
      zero(q + i * kc, kc);
      zero(do_dp + i * vc, vc);
      zero(do_dv + i * vc, vc);
      w.lse[first + i] = __builtin_nanf("");
    }
  for (int64_t i = 0; i < rows; ++i) {
    float& delta = w.delta[first + i] = do_finite[i] ? 0.f : __builtin_nanf("");
    if (w.lse[first + i] != __builtin_inff() && plan.delta != Delta::from_p)
      delta += delta_of(p, plan, seq, h, seq.q_first + token + i, do_dp + i * vc);
    delta -= dlse_of(p, seq, h, token + i);
    if (plan.format == GradientFormat::migrated) {
      w.q_amax[first + i] = finite_amax(q + i * kc, kc);
      w.do_amax[first + i] = finite_amax(do_dv + i * vc, vc);
    }
  }
  zero(w.dq + first * kc, rows * kc);
  w.turn[first] = static_cast<int32_t>(tiles_of(p, seq, token, rows).first);
}

}  // namespace octet::cpu::OCTET_ISA
