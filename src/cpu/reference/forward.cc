// o = softmax(s) v, tile after tile of keys with a running maximum, because a recipe rounds p = exp(s - m) against the
// maximum of its moment.
#include <algorithm>
#include <cmath>
#include <limits>
#include <octet/formats.hpp>

#include "cpu/reference/attention.h"
#include "cpu/reference/operands.h"
#include "cpu/sinks.h"

namespace octet::reference {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// The sums of one query so far.
struct Row {
  double m = -kInf, l = 0.0;
  double top = -kInf;  // largest logit, where m may have been moved away from it
  std::vector<double> acc;
};

// The maximum that a tile proposes: its largest logit, moved away from ties (arXiv 2510.04212, algorithm 1) but no
// further than beta_limit, beyond which exp would underflow. Ties of a negative maximum move to 0. The largest logit of
// earlier tiles counts too, so that it does not matter which tile a tie falls into.
double proposed_maximum(const Recipe& recipe, const std::vector<int64_t>& seen, const double* s, double unit,
                        double earlier) {
  double top = -kInf;
  for (int64_t j : seen) top = std::max(top, s[j]);
  if (recipe.beta == 0.0 || !std::isfinite(top) || top == 0.0) return top;
  const auto ties_with = [&](double x) { return unit * x >= unit * std::max(top, earlier) - recipe.tie_epsilon; };
  const auto ties = std::count_if(seen.begin(), seen.end(), [&](int64_t j) { return ties_with(s[j]); });
  if (!ties || ties + ties_with(earlier) < 2) return top;
  const double shifted = top > 0.0 ? recipe.beta * top : 0.0;
  return std::min(shifted, top + recipe.beta_limit / unit);
}

// Rounds a tile of p in place; unseen keys are 0.
void round_p(const PRecipe& recipe, std::vector<double>& p) {
  const double largest = *std::max_element(p.begin(), p.end());
  switch (recipe.scale) {
    case PRecipe::Scale::fixed:
      for (double& x : p) x = rounded_to(recipe.format, recipe.factor * x) / recipe.factor;
      break;
    case PRecipe::Scale::largest:
      for (double& x : p) x = rounded_on(recipe.format, x, largest);
      break;
    case PRecipe::Scale::nvfp4:
      round_nvfp4(p.data(), static_cast<int64_t>(p.size()), 1, 1.0 / (448.0 * 6.0));
      break;
  }
}

// Adds the keys [first, last) to a row.
void add_tile(const Head& head, const Recipe& recipe, const Values& values, const double* s, int64_t i, int64_t first,
              int64_t last, Row& row) {
  std::vector<int64_t> seen;
  for (int64_t j = first; j < last; ++j)
    if (head.sees(i, j)) seen.push_back(j);
  if (seen.empty()) return;

  const double unit = recipe.scale_first ? 1.0 : head.scale;
  const double m = std::max(row.m, round_to(recipe.m, proposed_maximum(recipe, seen, s, unit, row.top)));
  const double origin = m == -kInf ? 0.0 : m;  // a row of -inf has p = 0, not exp(-inf + inf)
  const double alpha = round_to(recipe.alpha, std::exp(unit * (row.m - origin)));

  std::vector<double> p(static_cast<std::size_t>(last - first), 0.0);
  double sum = 0.0;
  for (int64_t j : seen)
    sum += p[static_cast<std::size_t>(j - first)] = std::exp(round_to(recipe.arg, unit * (s[j] - origin)));
  if (recipe.fold_v)
    for (int64_t j : seen) p[static_cast<std::size_t>(j - first)] *= values.token_scale[static_cast<std::size_t>(j)];
  round_p(recipe.p, p);
  if (recipe.sum_rounded_p) {
    sum = 0.0;
    for (double x : p) sum += x;
  }

  for (int64_t j : seen) row.top = std::max(row.top, s[j]);
  row.m = m;
  row.l = alpha * row.l + sum;
  for (double& x : row.acc) x *= alpha;
  std::vector<double> p_kept;
  std::vector<int64_t> kept;
  for (int64_t j : seen)
    if (head.keeps(i, j)) p_kept.push_back(p[static_cast<std::size_t>(j - first)]), kept.push_back(j);
  add_rows(row.acc.data(), p_kept.data(), values.v, kept);
  for (double& x : row.acc) x = round_to(recipe.acc, x);
}

}  // namespace

Output forward(const Head& head, const Recipe& recipe) {
  const int64_t n = head.q.rows, m = head.k.rows, e = head.v.cols;
  const Logits logits(head, recipe.logits);
  const Values values(head.v, recipe, head.seen_k);
  const int64_t tile = std::min(recipe.tile, std::max<int64_t>(m, 1));
  Output out{Matrix(n, e), std::vector<double>(static_cast<std::size_t>(n), -kInf), Matrix(n, e)};
  std::vector<double> s(static_cast<std::size_t>(m));
  for (int64_t i = 0; i < n; ++i) {
    const KeyRange range = head.keys[static_cast<std::size_t>(i)];
    logits.row(i, recipe.scale_first, s.data());
    for (int64_t j = range.first; j < range.last; ++j)
      s[static_cast<std::size_t>(j)] = round_to(recipe.s, s[static_cast<std::size_t>(j)]);
    Row row{.acc = std::vector<double>(static_cast<std::size_t>(e), 0.0)};
    for (int64_t first = range.first / tile * tile; first < range.last; first += tile)
      add_tile(head, recipe, values, s.data(), i, first, std::min(first + tile, m), row);
    // The sink joins after the last tile, so that no p is rounded against it.
    const bool blind = row.m == -kInf && row.l == 0.0;  // sees nothing: o = 0, lse = -inf or the sink
    const double of_keys =
        blind ? -kInf : (recipe.scale_first ? 1.0 : head.scale) * row.m + std::log(row.l) + head.row_bias_of(i);
    const double lse = out.lse[static_cast<std::size_t>(i)] = with_sink(of_keys, head.sink);
    const double share = probability_of(of_keys, lse) * head.dropout_scale;  // of the keys, next to the sink
    for (int64_t c = 0; c < e; ++c) {
      const double o = blind ? 0.0
                             : row.acc[static_cast<std::size_t>(c)] / row.l +
                                   (recipe.smooth_v ? values.mean[static_cast<std::size_t>(c)] : 0.0);
      out.o_exact[i][c] = share * o;
      out.o[i][c] = round_to(recipe.o, out.o_exact[i][c]);
    }
  }
  return out;
}

}  // namespace octet::reference
