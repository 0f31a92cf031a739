// dq, dk, dv from whole matrices p and ds, each rounded on its tiles before it enters a product.
#include <algorithm>
#include <cmath>
#include <limits>
#include <octet/formats.hpp>

#include "core/quant/hadamard.h"
#include "cpu/reference/attention.h"
#include "cpu/reference/operands.h"
#include "cpu/sinks.h"

namespace octet::reference {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

std::size_t index(int64_t i) { return static_cast<std::size_t>(i); }

// Calls body(j) for the keys that query i sees, ascending.
template <class Body>
void for_seen(const Head& head, int64_t i, const Body& body) {
  const KeyRange range = head.keys[index(i)];
  for (int64_t j = range.first; j < range.last; ++j)
    if (head.sees(i, j)) body(j);
}

// Returns p = exp(s - lse), [n m], 0 for masked keys, with the caller's lse or the rows' own, which replaces it in
// `lse`; lse lacks the row bias. Of the logits by scale q.k it leaves the `derivative`, [n m].
Matrix probabilities(const Head& head, const Recipe& recipe, const Logits& logits, std::vector<double>& lse,
                     Matrix& derivative) {
  Matrix p(head.q.rows, head.k.rows);
  std::vector<double> s(index(head.k.rows));
  const double unit = recipe.scale_first ? 1.0 : head.scale;
  for (int64_t i = 0; i < p.rows; ++i) {
    logits.row(i, recipe.scale_first, s.data(), derivative[i]);
    double top = -kInf, sum = 0.0;
    for_seen(head, i, [&](int64_t j) {
      s[index(j)] = unit * round_to(recipe.s, s[index(j)]), top = std::max(top, s[index(j)]);
    });
    for_seen(head, i, [&](int64_t j) { sum += std::exp(s[index(j)] - top); });
    // Beside a large row bias a saved lse has lost the bits of the logits.
    const double row_bias = head.row_bias_of(i);
    if (recipe.backward.recompute || (std::fabs(row_bias) >= 16.0 && lse[index(i)] != -kInf))
      lse[index(i)] = with_sink(top == -kInf ? top : top + std::log(sum), head.sink - row_bias);
    else
      lse[index(i)] -= row_bias;
    for_seen(head, i, [&](int64_t j) { p[i][j] = probability_of(s[index(j)], lse[index(i)]); });
  }
  return p;
}

// [n m], 0 where not seen or dropped: dp = (do v^T) z.
Matrix product_with_values(const Head& head, const Matrix& do_, const Matrix& v) {
  Matrix dp(head.q.rows, head.k.rows);
  const Matrix v_transposed = transposed(v);
  for (int64_t i = 0; i < dp.rows; ++i) {
    const KeyRange range = head.keys[index(i)];
    add_rows(dp[i] + range.first, do_[i], v_transposed, range.first, range.last - range.first);
    for (int64_t j = range.first; j < range.last; ++j)
      dp[i][j] = head.sees(i, j) && head.keeps(i, j) ? dp[i][j] * head.dropout_scale : 0.0;
  }
  return dp;
}

double delta_of(const BackwardRecipe& recipe, const Matrix& p, double p_sink, const Matrix& dp, const Matrix& o,
                const Matrix& do_, int64_t i) {
  double sum = 0.0, sum_p = p_sink;  // dp of the sink is 0
  if (recipe.delta == OCTET_DELTA_FROM_O) {
    for (int64_t c = 0; c < o.cols; ++c) sum += do_[i][c] * round_to(recipe.o_saved, o[i][c]);
    return sum;
  }
  for (int64_t j = 0; j < p.cols; ++j)
    if (p[i][j] != 0.0) sum += p[i][j] * dp[i][j], sum_p += p[i][j];
  return sum_p == 0.0 ? 0.0 : sum / sum_p;
}

// x rounded over tiles.
Matrix rounded_tiles(Matrix x, const TileRecipe& recipe) {
  if (!recipe.rows) {
    for (double& value : x.data)
      value = recipe.power_of_two ? rounded_in_any_range(recipe.format, value)
                                  : rounded_to(recipe.format, recipe.factor * value) / recipe.factor;
    return x;
  }
  for (int64_t top = 0; top < x.rows; top += recipe.rows)
    for (int64_t left = 0; left < x.cols; left += recipe.cols) {
      const int64_t bottom = std::min(x.rows, top + recipe.rows), right = std::min(x.cols, left + recipe.cols);
      double largest = 0.0;
      for (int64_t i = top; i < bottom; ++i)
        for (int64_t j = left; j < right; ++j)
          if (std::isfinite(x[i][j])) largest = std::max(largest, std::fabs(x[i][j]));
      for (int64_t i = top; i < bottom; ++i)
        for (int64_t j = left; j < right; ++j) x[i][j] = rounded_on(recipe.format, x[i][j], largest);
    }
  return x;
}

// The probability that a row gives to the sink, and its gradient, both un-rounded.
struct SinkRow {
  double p = 0.0, ds = 0.0;
};

// Takes from dq and dk what rounding ds to a row sum other than dlse put there: lambda_i = (sum ds - dlse) / sum p,
// dq -= lambda p k, dk -= p^T (lambda q)  (GProj, arXiv 2609.34272). Both sums count the sink as one more key. With a
// softcap the rows of ds have their sum before its derivative multiplies them: `ds` is that, and p k and p^T q are
// those of p times the derivative.
void project(const Head& head, octet_dtype format, const Matrix& p, const Matrix& ds, const Matrix& derivative,
             const std::vector<double>& dlse, std::vector<SinkRow>& sink, const Logits& logits, Gradients& g) {
  std::vector<double> lambda_q(index(head.q.cols));
  for (int64_t i = 0; i < p.rows; ++i) {
    double sum_ds = sink[index(i)].ds - dlse[index(i)], sum_p = sink[index(i)].p;
    for_seen(head, i, [&](int64_t j) { sum_ds += ds[i][j], sum_p += round_to(format, p[i][j]); });
    if (sum_p == 0.0) continue;
    const double lambda = sum_ds / sum_p;
    sink[index(i)].ds -= lambda * sink[index(i)].p;
    for (int64_t c = 0; c < head.q.cols; ++c) lambda_q[index(c)] = round_to(format, lambda * logits.q()[i][c]);
    for_seen(head, i, [&](int64_t j) {
      const double rounded_p = round_to(format, round_to(format, p[i][j]) * derivative[i][j]);
      add_scaled(g.dq[i], -lambda * rounded_p, logits.k()[j], head.q.cols);
      add_scaled(g.dk[j], -rounded_p, lambda_q.data(), head.q.cols);
    });
  }
}

// Adds what smoothing took from the operands of dq = ds k and dk = ds^T q, times the un-rounded ds: the means of blocks
// where the operands are those of the logits. The mean of all keys, `centre`, meets the sum of a row of ds, `row_sums`.
// In attention alone that sum is 0 but for rounding, and exactly 0 here, so that the mean does not multiply the
// rounding errors.
void add_means(const Head& head, const BackwardRecipe& how, const Logits& logits, const std::vector<double>& centre,
               const Matrix& ds, const std::vector<double>& row_sums, Gradients& g) {
  const Smoothed &q = logits.smooth_q(), &k = logits.smooth_k();
  const bool q_means = q.means.rows && !how.q_dk;
  Matrix offsets = k.means.rows > 1 && !how.smooth_dq ? k.means : Matrix();
  for (int64_t b = 0; b < offsets.rows; ++b) add_scaled(offsets[b], -1.0, centre.data(), offsets.cols);
  for (int64_t i = 0; i < ds.rows; ++i) {
    if (!centre.empty() && row_sums[index(i)] != 0.0)
      add_scaled(g.dq[i], row_sums[index(i)], centre.data(), head.q.cols);
    for_seen(head, i, [&](int64_t j) {
      if (offsets.rows) add_scaled(g.dq[i], ds[i][j], offsets[j / k.block], head.q.cols);
      if (q_means) add_scaled(g.dk[j], ds[i][j], q.mean_of(i), head.q.cols);
    });
  }
}

}  // namespace

Gradients backward(const Head& head, const Matrix& o, const std::vector<double>& saved_lse, const Matrix& do_,
                   const Recipe& recipe, const std::vector<double>& given_dlse) {
  const BackwardRecipe& how = recipe.backward;
  const int64_t n = head.q.rows, m = head.k.rows, d = head.q.cols, e = head.v.cols;
  const Logits logits(head, how.logits);
  const Matrix do_dp = quantized(do_, how.do_dp, head.seen_q), do_dv = quantized(do_, how.do_dv, head.seen_q);
  const Smoothed smooth_v(head.v, how.smooth_v ? kAllTokens : 0, head.seen_k);
  Matrix v = quantized(smooth_v.x, how.v, head.seen_k);
  for (int64_t j = 0; j < m && how.smooth_v; ++j)
    if (sees_token(head.seen_k, j)) add_scaled(v[j], 1.0, smooth_v.mean_of(j), e);

  std::vector<double> lse = saved_lse, dlse = given_dlse, row_sums(index(n));
  dlse.resize(index(n), 0.0);
  Matrix derivative(n, m);
  const Matrix p = probabilities(head, recipe, logits, lse, derivative);
  const Matrix dp = product_with_values(head, do_dp, v);
  Matrix ds(n, m);
  std::vector<SinkRow> sink(index(n));
  for (int64_t i = 0; i < n; ++i) {
    const double p_sink = probability_of(head.sink - head.row_bias_of(i), lse[index(i)]);
    const double delta = delta_of(how, p, p_sink, dp, o, do_dp, i);
    for_seen(head, i, [&](int64_t j) { ds[i][j] = p[i][j] * (dp[i][j] - delta + dlse[index(i)]); });
    if (p_sink != 0.0) sink[index(i)] = {p_sink, p_sink * (dlse[index(i)] - delta)};
    // p sums to 1 with the sink, so sum ds = sum p (dp - delta + dlse) = p_sink delta + (1 - p_sink) dlse.
    if (lse[index(i)] != -kInf) row_sums[index(i)] = dlse[index(i)] - sink[index(i)].ds;
  }
  Matrix ds_uncapped = head.softcap != 0.0 ? ds : Matrix();
  for (int64_t i = 0; i < ds_uncapped.rows; ++i) {
    row_sums[index(i)] = 0.0;
    for_seen(head, i, [&](int64_t j) { row_sums[index(i)] += ds[i][j] *= derivative[i][j]; });
  }

  const Matrix ds_q = rounded_tiles(ds, how.ds_q), ds_k = rounded_tiles(ds, how.ds_k), p_dv = rounded_tiles(p, how.p);

  // A cast is to the precision's own format, and comes before all else; scales are those of the logits alone.
  Matrix k_dq = how.logits.k.group == Group::cast ? quantized(head.k, how.logits.k, head.seen_k) : head.k;
  std::vector<double> centre;  // what the k of dq lacks
  if (how.smooth_dq || how.logits.smooth_k) centre = channel_means(k_dq, head.seen_k, 0, m);
  if (how.smooth_dq) {
    subtract(k_dq, centre, head.seen_k, 0, m);
    k_dq = quantized(k_dq, *how.smooth_dq, head.seen_k);
  } else {
    k_dq = logits.k();
  }
  const Matrix q_dk = how.q_dk ? quantized(head.q, *how.q_dk, head.seen_q) : logits.q();
  Gradients g{Matrix(n, d), Matrix(m, d), Matrix(m, e)};
  for (int64_t i = 0; i < n; ++i)
    for_seen(head, i, [&](int64_t j) {
      add_scaled(g.dq[i], ds_q[i][j], k_dq[j], d);
      add_scaled(g.dk[j], ds_k[i][j], q_dk[i], d);
      if (head.keeps(i, j)) add_scaled(g.dv[j], p_dv[i][j] * head.dropout_scale, do_dv[i], e);
    });
  if (how.gproj != OCTET_F64) {
    const Matrix uncapped = rounded_tiles(ds_uncapped, how.ds_q);
    project(head, how.gproj, p, uncapped.rows ? uncapped : ds_q, derivative, dlse, sink, logits, g);
  }
  if (how.logits.hadamard && !how.smooth_dq) g.dq = rotated_back(std::move(g.dq), kHadamardSeed);
  if (how.logits.hadamard && !how.q_dk) g.dk = rotated_back(std::move(g.dk), kHadamardSeed);
  add_means(head, how, logits, centre, ds, row_sums, g);
  for (Matrix* x : {&g.dq, &g.dk})
    for (double& value : x->data) value *= head.scale;
  for (const SinkRow& row : sink) g.dsink += row.ds;
  g.dbias = std::move(head.softcap != 0.0 ? ds_uncapped : ds);
  return g;
}

}  // namespace octet::reference
