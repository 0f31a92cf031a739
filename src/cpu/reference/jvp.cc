// o, lse and their derivatives along tangents, in one loop over tiles of keys. With h = p (ts - c):
//   o~ += p v     t~ += p tv + h v     r += sum h     l += sum p
//   o = o~ / l     to = (t~ - r o) / l     lse = m + log l     tlse = c + r / l
// Adding a constant to a row of ts changes nothing in to, so c, the p-weighted mean of ts in the first tile, is free to
// keep h small; r and l sum the rounded h and p, so that their roundings cancel against those in t~ and o~.
// With dropout, o~ and t~ lack the p and h of dropped elements, and o and to are divided by 1 minus the probability.
// A sink leaves the keys the share w = exp(lse of the keys - lse) of all probabilities:
//   o = w o     to = w (to + (1 - w) (tlse - tsink) o)     tlse = w tlse + (1 - w) tsink
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

struct Row {
  double m = -kInf, l = 0.0, r = 0.0, centre = 0.0;
  std::vector<double> o, t;

  void rescale(double alpha) {
    l *= alpha, r *= alpha;
    for (double& x : o) x *= alpha;
    for (double& x : t) x *= alpha;
  }
};

struct Operands {
  const Head& head;
  const Recipe& recipe;
  Matrix q, k, v, tq, tk, tv;

  // `derivative`: of the logit by scale q.k.
  double tangent_logit(int64_t i, int64_t j, double derivative) const {
    return derivative * head.scale * (dot(tq[i], k[j], k.cols) + dot(q[i], tk[j], k.cols));
  }
};

void add_tile(const Operands& x, const double* s, const double* derivative, int64_t i, const std::vector<int64_t>& seen,
              Row& row) {
  double top = row.m;
  for (int64_t j : seen) top = std::max(top, s[j]);
  const double origin = top == -kInf ? 0.0 : top;
  row.rescale(std::exp(row.m - origin));
  const bool first = row.m == -kInf;
  row.m = top;

  std::vector<double> p, ts;
  for (int64_t j : seen) p.push_back(std::exp(s[j] - origin)), ts.push_back(x.tangent_logit(i, j, derivative[j]));
  if (first) {
    double sum = 0.0, weighted = 0.0;
    for (std::size_t z = 0; z < p.size(); ++z) sum += p[z], weighted += p[z] * ts[z];
    row.centre = sum > 0.0 ? weighted / sum : 0.0;
  }
  std::vector<double> h(p.size());
  for (std::size_t z = 0; z < p.size(); ++z) {
    h[z] = round_to(x.recipe.tangent, p[z] * (ts[z] - row.centre));
    p[z] = round_to(x.recipe.tangent, p[z]);
    row.l += p[z], row.r += h[z];
  }
  std::vector<double> p_kept, h_kept;
  std::vector<int64_t> kept;
  for (std::size_t z = 0; z < p.size(); ++z)
    if (x.head.keeps(i, seen[z])) p_kept.push_back(p[z]), h_kept.push_back(h[z]), kept.push_back(seen[z]);
  add_rows(row.o.data(), p_kept.data(), x.v, kept);
  add_rows(row.t.data(), p_kept.data(), x.tv, kept);
  add_rows(row.t.data(), h_kept.data(), x.v, kept);
}

constexpr int64_t kTile = 64;  // keys per step of the softmax

}  // namespace

JvpOutput jvp(const Head& head, const Tangents& tangents, const Recipe& recipe) {
  const int64_t n = head.q.rows, m = head.k.rows, e = head.v.cols;
  const Quantizer cast{recipe.tangent};
  const Logits logits(head, {.q = cast, .k = cast});
  const Operands x{head,
                   recipe,
                   quantized(head.q, cast),
                   quantized(head.k, cast),
                   quantized(head.v, cast),
                   quantized(tangents.q, cast),
                   quantized(tangents.k, cast),
                   quantized(tangents.v, cast)};
  const auto rows = static_cast<std::size_t>(n);
  JvpOutput out{{Matrix(n, e), std::vector<double>(rows, -kInf), {}}, Matrix(n, e), std::vector<double>(rows, 0.0)};
  std::vector<double> s(static_cast<std::size_t>(m)), derivative(s.size());
  for (int64_t i = 0; i < n; ++i) {
    const KeyRange range = head.keys[static_cast<std::size_t>(i)];
    logits.row(i, true, s.data(), derivative.data());
    Row row{.o = std::vector<double>(static_cast<std::size_t>(e), 0.0),
            .t = std::vector<double>(static_cast<std::size_t>(e), 0.0)};
    for (int64_t first = range.first / kTile * kTile; first < range.last; first += kTile) {
      std::vector<int64_t> seen;
      for (int64_t j = first; j < std::min(first + kTile, m); ++j)
        if (head.sees(i, j)) seen.push_back(j);
      if (!seen.empty()) add_tile(x, s.data(), derivative.data(), i, seen, row);
    }
    const bool blind = row.m == -kInf && row.l == 0.0;
    const double of_keys = blind ? -kInf : row.m + std::log(row.l) + head.row_bias_of(i),
                 lse = with_sink(of_keys, head.sink);
    const double share = probability_of(of_keys, lse), kept_share = share * head.dropout_scale,
                 of_sink = probability_of(head.sink, lse);
    const double mean = blind ? 0.0 : row.centre + row.r / row.l;
    out.primal.lse[static_cast<std::size_t>(i)] = lse;
    out.tlse[static_cast<std::size_t>(i)] = share * mean + of_sink * tangents.sink;
    if (blind) continue;
    for (int64_t c = 0; c < e; ++c) {
      const auto z = static_cast<std::size_t>(c);
      const double o = row.o[z] / row.l, to = (row.t[z] - row.r * o) / row.l;
      out.primal.o[i][c] = kept_share * o;
      out.to[i][c] = kept_share * (to + of_sink * (mean - tangents.sink) * o);
    }
  }
  out.primal.o_exact = out.primal.o;
  return out;
}

}  // namespace octet::reference
