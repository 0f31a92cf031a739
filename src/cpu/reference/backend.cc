// The oracle as a backend: reads a problem's tensors into float64 matrices, one head of one sequence at a time, runs
// the problem's recipe on them and stores what comes out. It may use the heap; nothing here is fast.
#include "core/backend.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <octet/formats.hpp>

#include "core/error.h"
#include "core/names.h"
#include "core/o_residual.h"
#include "cpu/parallel.h"
#include "cpu/reference/attention.h"
#include "cpu/reference/operands.h"

namespace octet {
namespace reference {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

double element(const View& x, int64_t b, int64_t h, int64_t t, int64_t c) {
  return load(x.dtype, x.data, x.offset(b, h, t, c));
}

// Tokens [first, first + count) of one head, as numbers.
Matrix load_tokens(const View& x, int64_t b, int64_t h, int64_t first, int64_t count) {
  Matrix out(count, x.shape[3]);
  for (int64_t t = 0; t < count; ++t)
    for (int64_t c = 0; c < out.cols; ++c) out[t][c] = element(x, b, h, first + t, c);
  return out;
}

int64_t scale_row(const octet_quantization& how, int64_t token) {
  const bool query = how.operand == OCTET_OPERAND_Q;
  switch (how.granularity) {
    case OCTET_PER_TOKEN:
      return token;
    case OCTET_PER_BLOCK:
      return token / how.block;
    case OCTET_PER_THREAD:
      return query ? token / 32 * 8 + token % 8 : token / 64 * 4 + token % 8 / 2;
    default:
      return 0;
  }
}

double parameter(const octet_tensor& x, int64_t b, int64_t h, int64_t t, int64_t c) {
  return static_cast<const float*>(x.data)[b * x.stride[0] + h * x.stride[1] + t * x.stride[2] + c * x.stride[3]];
}

// Quantized values to numbers: times scale, about the zero point, rotated back, plus mean (octet_quantization).
Matrix load_operand(const View& x, int64_t sequence, int64_t h, int64_t first, int64_t count) {
  Matrix out = load_tokens(x, sequence, h, first, count);
  if (!x.quantization) return out;
  const octet_quantization& how = *x.quantization;
  for (int64_t t = 0; t < count; ++t)
    for (int64_t c = 0; c < out.cols; ++c) {
      const auto [b, token] = x.place(sequence, first + t);
      const int64_t row = scale_row(how, token), channel = how.granularity == OCTET_PER_CHANNEL ? c : 0;
      const double scale = parameter(*how.scale, b, h, row, channel);
      const double zero = how.zero_point_kind == OCTET_SYMMETRIC ? 0.0 : parameter(*how.zero_point, b, h, row, channel);
      out[t][c] = how.zero_point_kind == OCTET_ZERO_POINT_FLOAT ? scale * out[t][c] + zero : scale * (out[t][c] - zero);
    }
  if (how.hadamard_seed) out = rotated_back(std::move(out), how.hadamard_seed);
  if (how.mean)
    for (int64_t t = 0; t < count; ++t)
      for (int64_t c = 0; c < out.cols; ++c) out[t][c] += parameter(*how.mean, sequence, h, 0, c);
  return out;
}

void store_tokens(const View& x, int64_t b, int64_t h, int64_t first, const Matrix& values) {
  for (int64_t t = 0; t < values.rows; ++t)
    for (int64_t c = 0; c < values.cols; ++c) store(x.dtype, x.data, x.offset(b, h, first + t, c), values[t][c]);
}

void store_column(const View& x, int64_t b, int64_t h, int64_t first, const std::vector<double>& values) {
  if (!x.present()) return;
  for (std::size_t t = 0; t < values.size(); ++t)
    store(x.dtype, x.data, x.offset(b, h, first + static_cast<int64_t>(t), 0), values[t]);
}

// Returns whether the mask tensor hides key j from query i.
bool hides(const View& mask, int64_t b, int64_t h, int64_t i, int64_t j) {
  return mask.present() && element(mask, b, h, i, j) == (mask.dtype == OCTET_BOOL ? 0.0 : -kInf);
}

// Loads what a mask tensor and ALiBi add to the logits.
void load_bias(const Problem& problem, const Sequence& at, int64_t h, Head& head) {
  const View &mask = problem.mask, &slopes = problem.alibi_slopes;
  const int64_t b = at.batch, n = head.q.rows, m = head.k.rows;
  const bool adds_mask = mask.present() && mask.dtype != OCTET_BOOL;
  if (mask.present()) head.hidden.assign(static_cast<std::size_t>(n * m), false);
  if (!mask.present() && !slopes.present()) return;
  double slope = slopes.present() ? element(slopes, at.index, h, 0, 0) : 0.0;
  if (!std::isfinite(slope)) slope = std::numeric_limits<double>::quiet_NaN();
  if (adds_mask || slopes.present()) head.bias = Matrix(n, m), head.row_bias.assign(static_cast<std::size_t>(n), 0.0);
  for (int64_t i = 0; i < n; ++i) {
    double top = -kInf;
    for (int64_t j = 0; j < m; ++j) {
      if (hides(mask, b, h, i, j))
        head.hidden[static_cast<std::size_t>(i * m + j)] = true;
      else if (head.bias.rows)
        head.bias[i][j] =
            (adds_mask ? element(mask, b, h, i, j) : 0.0) - slope * static_cast<double>(std::abs(i + m - n - j));
      if (head.sees(i, j) && head.bias.rows) top = std::max(top, head.bias[i][j]);
    }
    // A number common to a row changes nothing but lse; a large one would take the bits of the logits.
    if (!std::isfinite(top) || problem.rounding) continue;
    head.row_bias[static_cast<std::size_t>(i)] = top;
    for (int64_t j = 0; j < m; ++j) head.bias[i][j] -= top;
  }
}

// Draws the elements of P that are dropped.
void load_dropout(const Problem& problem, const Sequence& at, int64_t h, Head& head) {
  if (!problem.dropout) return;
  const DropoutStream stream = problem.dropout_stream(at, h);
  head.dropout_scale = problem.dropout_scale();
  head.dropped.assign(static_cast<std::size_t>(head.q.rows * head.k.rows), false);
  for (int64_t i = 0; i < head.q.rows; ++i)
    for (int64_t j = 0; j < head.k.rows; ++j)
      head.dropped[static_cast<std::size_t>(i * head.k.rows + j)] = is_dropped(stream, problem.dropout, i, j);
}

// The queries of head h that see a key, and in `keys` those that they see.
Seen seen_queries(const Problem& problem, const Sequence& at, int64_t h, Seen& keys) {
  Seen queries(static_cast<std::size_t>(at.q_tokens), false);
  for (int64_t i = 0; i < at.q_tokens; ++i) {
    const KeyRange range = problem.keys_of(i, at.q_tokens, at.k_tokens);
    for (int64_t j = range.first; j < range.last; ++j)
      if (!hides(problem.mask, at.batch, h, i, j))
        queries[static_cast<std::size_t>(i)] = keys[static_cast<std::size_t>(j)] = true;
  }
  return queries;
}

// Head h of a sequence; `kv` holds k and v already, and which of their tokens are seen.
Head load_head(const Problem& problem, const Sequence& at, int64_t h, const Head& kv) {
  Head head = kv;
  head.q = load_operand(problem.q, at.batch, h, at.q_first, at.q_tokens);
  head.scale = problem.scale;
  head.softcap = problem.softcap;
  if (problem.sinks.present()) head.sink = element(problem.sinks, at.batch, h, 0, 0);
  for (int64_t i = 0; i < at.q_tokens; ++i) head.keys.push_back(problem.keys_of(i, at.q_tokens, at.k_tokens));
  load_bias(problem, at, h, head);
  load_dropout(problem, at, h, head);
  head.seen_q = seen_queries(problem, at, h, head.seen_k);
  return head;
}

// Quantized operands are not quantized again: an operand that came in the recipe's own format keeps its numbers,
// un-smoothed.
Recipe recipe_for(const Problem& problem) {
  Recipe recipe = recipe_of(problem);
  const auto prequantized = [](const View& x, const Quantizer& q) {
    return q.group != Group::cast && (x.dtype == OCTET_U8 ? OCTET_I8 : x.dtype) == q.format;
  };
  for (LogitRecipe* logits : {&recipe.logits, &recipe.backward.logits}) {
    const bool q = prequantized(problem.q, logits->q), k = prequantized(problem.k, logits->k);
    if (q || k) logits->hadamard = logits->hadamard && !q && !k;
    if (q) logits->q = {}, logits->smooth_q = 0;
    if (k) logits->k = {}, logits->smooth_k = 0;
  }
  if (prequantized(problem.v, recipe.v)) recipe.smooth_v = false;
  if (prequantized(problem.v, recipe.backward.v)) recipe.backward.v = {}, recipe.backward.smooth_v = false;
  return recipe;
}

void run_forward(const Problem& problem, const Recipe& recipe, const Sequence& at, int64_t h, const Head& kv) {
  const Output out = forward(load_head(problem, at, h, kv), recipe);
  store_tokens(problem.o, at.batch, h, at.q_first, out.o);
  store_column(problem.lse, at.batch, h, at.q_first, out.lse);
  if (!problem.o_residual.present()) return;
  Matrix residual = out.o_exact;
  const bool bytes = problem.o_residual.dtype == OCTET_I8;
  const int shift = residual_shift(problem.o.dtype);
  for (std::size_t z = 0; z < residual.data.size(); ++z) {
    const double rounded = round_to(problem.o.dtype, out.o.data[z]);
    residual.data[z] = bytes ? residual_of(static_cast<float>(residual.data[z]), static_cast<float>(rounded), shift)
                             : residual.data[z] - rounded;
  }
  store_tokens(problem.o_residual, at.batch, h, at.q_first, residual);
}

void run_jvp(const Problem& problem, const Recipe& recipe, const Sequence& at, int64_t h, int64_t kv_head,
             const Head& kv) {
  const auto tangent_of = [&](const View& x, int64_t head, int64_t first, int64_t count, int64_t dim) {
    return x.present() ? load_tokens(x, at.batch, head, first, count) : Matrix(count, dim);  // of zeros
  };
  const Tangents tangents{tangent_of(problem.tq, h, at.q_first, at.q_tokens, problem.dim),
                          tangent_of(problem.tk, kv_head, at.k_first, at.k_tokens, problem.dim),
                          tangent_of(problem.tv, kv_head, at.k_first, at.k_tokens, problem.dim_v),
                          problem.tsinks.present() ? element(problem.tsinks, at.batch, h, 0, 0) : 0.0};
  const JvpOutput out = jvp(load_head(problem, at, h, kv), tangents, recipe);
  store_tokens(problem.o, at.batch, h, at.q_first, out.primal.o);
  store_column(problem.lse, at.batch, h, at.q_first, out.primal.lse);
  store_tokens(problem.to, at.batch, h, at.q_first, out.to);
  store_column(problem.tlse, at.batch, h, at.q_first, out.tlse);
}

// The sums of gradients of tensors that sequences and heads share.
struct SharedGradients {
  std::vector<double> dsinks;  // [sequence, head]
  std::vector<double> dmask;   // of its shape
};

void add_dmask(const View& out, const Sequence& at, int64_t h, const Matrix& dbias, std::vector<double>& sums) {
  const auto place = [&](int dimension, int64_t i) { return out.shape[dimension] == 1 ? 0 : i; };
  const int64_t first = (place(0, at.batch) * out.shape[1] + place(1, h)) * out.shape[2];
  for (int64_t i = 0; i < dbias.rows && !sums.empty(); ++i)
    for (int64_t j = 0; j < dbias.cols; ++j)
      sums[static_cast<std::size_t>((first + place(2, i)) * out.shape[3] + place(3, j))] += dbias[i][j];
}

// Adds head h's share to dk and dv, which the heads of a group have in common, and to the gradients of its sink and of
// the mask.
void run_backward(const Problem& problem, const Recipe& recipe, const Sequence& at, int64_t h, const Head& kv,
                  Matrix& dk, Matrix& dv, SharedGradients& shared) {
  Matrix o = load_tokens(problem.o, at.batch, h, at.q_first, at.q_tokens);
  if (recipe.backward.exact_o && problem.o_residual.present()) {
    const Matrix residual = load_tokens(problem.o_residual, at.batch, h, at.q_first, at.q_tokens);
    const int shift = residual_shift(problem.o.dtype);
    for (std::size_t z = 0; z < o.data.size(); ++z)
      o.data[z] = problem.o_residual.dtype == OCTET_I8
                      ? with_residual(static_cast<float>(o.data[z]), static_cast<int8_t>(residual.data[z]), shift)
                      : o.data[z] + residual.data[z];
  }
  const Matrix lse = load_tokens(problem.lse, at.batch, h, at.q_first, at.q_tokens);
  const Matrix do_ = load_tokens(problem.do_, at.batch, h, at.q_first, at.q_tokens);
  Matrix dlse;
  if (problem.dlse.present()) dlse = load_tokens(problem.dlse, at.batch, h, at.q_first, at.q_tokens);
  const Gradients g = backward(load_head(problem, at, h, kv), o, lse.data, do_, recipe, dlse.data);
  store_tokens(problem.dq, at.batch, h, at.q_first, g.dq);
  for (std::size_t z = 0; z < dk.data.size(); ++z) dk.data[z] += g.dk.data[z];
  for (std::size_t z = 0; z < dv.data.size(); ++z) dv.data[z] += g.dv.data[z];
  shared.dsinks[static_cast<std::size_t>(at.index * problem.heads + h)] = g.dsink;
  add_dmask(problem.dmask, at, h, g.dbias, shared.dmask);
}

// All heads of q that share one head of k and v, one after the other, so that dk and dv have one order of summation.
void run_group(const Problem& problem, const Recipe& recipe, const Sequence& at, int64_t kv_head,
               SharedGradients& shared) {
  Head kv;
  kv.k = load_operand(problem.k, at.batch, kv_head, at.k_first, at.k_tokens);
  kv.v = load_operand(problem.v, at.batch, kv_head, at.k_first, at.k_tokens);
  kv.seen_k.assign(static_cast<std::size_t>(at.k_tokens), false);
  for (int64_t h = kv_head * problem.group(); h < (kv_head + 1) * problem.group(); ++h)
    seen_queries(problem, at, h, kv.seen_k);
  Matrix dk(at.k_tokens, problem.dim), dv(at.k_tokens, problem.dim_v);
  for (int64_t h = kv_head * problem.group(); h < (kv_head + 1) * problem.group(); ++h) {
    if (problem.pass == OCTET_FORWARD) run_forward(problem, recipe, at, h, kv);
    if (problem.pass == OCTET_JVP) run_jvp(problem, recipe, at, h, kv_head, kv);
    if (problem.pass == OCTET_BACKWARD) run_backward(problem, recipe, at, h, kv, dk, dv, shared);
  }
  if (problem.pass != OCTET_BACKWARD) return;
  store_tokens(problem.dk, at.batch, kv_head, at.k_first, dk);
  store_tokens(problem.dv, at.batch, kv_head, at.k_first, dv);
}

// Sums over sequences, and over the batch where it shares its sinks; 0 where there are none. `parts`: [sequence, head].
void store_dsinks(const Problem& problem, const std::vector<Sequence>& all, const std::vector<double>& parts) {
  const View& out = problem.dsinks;
  if (!out.present()) return;
  for (int64_t b = 0; b < out.shape[0]; ++b)
    for (int64_t h = 0; h < problem.heads; ++h) {
      double sum = 0.0;
      for (std::size_t n = 0; n < all.size(); ++n)
        if (out.shape[0] == 1 || all[n].batch == b)
          sum += parts[n * static_cast<std::size_t>(problem.heads) + static_cast<std::size_t>(h)];
      store(out.dtype, out.data, out.offset(b, h, 0), sum);
    }
}

void store_dmask(const View& out, const std::vector<double>& sums) {
  for (std::size_t z = 0; z < sums.size(); ++z) {
    const auto at = static_cast<int64_t>(z), row = at / out.shape[3], head = row / out.shape[2];
    store(out.dtype, out.data,
          out.offset(head / out.shape[1], head % out.shape[1], row % out.shape[2], at % out.shape[3]), sums[z]);
  }
}

void run(const Problem& problem) {
  const Recipe recipe = recipe_for(problem);
  const std::vector<Sequence> all = sequences(problem);
  const int64_t tasks = static_cast<int64_t>(all.size()) * problem.kv_heads;
  SharedGradients shared{std::vector<double>(all.size() * static_cast<std::size_t>(problem.heads), 0.0),
                         std::vector<double>(static_cast<std::size_t>(problem.dmask.elements()), 0.0)};
  // One thread where tasks add to one dmask: their order is that of its sums.
  const unsigned threads = cpu::thread_count(problem.dmask.present() ? 1 : problem.threads, tasks);
  cpu::parallel_for(threads, tasks, [&](int64_t task, unsigned) {
    const Sequence& at = all[static_cast<std::size_t>(task / problem.kv_heads)];
    run_group(problem, recipe, at, task % problem.kv_heads, shared);
  });
  store_dsinks(problem, all, shared.dsinks);
  store_dmask(problem.dmask, shared.dmask);
}

std::string kernel(const Problem& problem) {
  return text(name(problem.pass), ' ', name(problem.precision), ", unfused float64");
}

Answer plan(const Problem& problem, void*) {
  if (auto reason = unsupported_reason(problem)) return std::move(*reason);
  return Plan{0, [&problem] { return kernel(problem); }, [&problem](void*) { run(problem); }};
}

// No other backend has f64.
std::optional<std::string> deferral_reason(const Problem& problem) {
  if (problem.precision == OCTET_PRECISION_F64) return {};
  return "runs only when asked for by name";
}

}  // namespace
}  // namespace reference

extern const Backend kReference;
const Backend kReference{
    .name = "reference",
    .description = "unfused float64 with the rounding points of every precision: the oracle",
    .device = OCTET_CPU,
    .unavailable = [] { return std::optional<std::string>(); },
    .plan = reference::plan,
    .deferral_reason = reference::deferral_reason,
};

}  // namespace octet
