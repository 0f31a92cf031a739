// Unfused attention of one head in float64, with a recipe's roundings. With Recipe{} it is exact:
//   s = softcap(scale q k^T) + bias, where softcap(x) = c tanh(x / c)
//   z_ij = 0 where dropout drops an element, else 1 / (1 - its probability); 1 without dropout
//   lse_i = log (sum_j exp(s_ij) + exp(sink))     p = exp(s - lse)     o = (p z) v
//   dp = (do v^T) z   delta_i = sum_j p_ij dp_ij   ds = p (dp - delta + dlse) softcap'(scale q k^T)
//   dq = scale ds k   dk = scale ds^T q   dv = (p z)^T do   dsink = sum_i exp(sink - lse_i) (dlse_i - delta_i)
//   dbias = ds without softcap', before it is rounded
//   ts = scale (tq k^T + q tk^T) softcap'(scale q k^T)   tlse_i = sum_j p_ij ts_ij + exp(sink - lse_i) tsink
//   to_i = sum_j p_ij z_ij (ts_ij - tlse_i) v_j + sum_j p_ij z_ij tv_j
// Sums over keys run over those that a query sees, by index; the others are never touched.
#pragma once
#include <limits>

#include "core/recipe.h"
#include "cpu/reference/matrix.h"

namespace octet::reference {

// Tokens that take part in statistics (means, largest magnitudes): the keys that some query sees, the queries that see
// some key. Empty: all.
using Seen = std::vector<bool>;
inline bool sees_token(const Seen& seen, int64_t token) {
  return seen.empty() || seen[static_cast<std::size_t>(token)];
}

// One head of one sequence: n queries, m keys.
struct Head {
  Matrix q, k, v;  // [n d] [m d] [m e]
  double scale = 1.0;
  double softcap = 0.0;                                    // c; 0: none
  std::vector<KeyRange> keys{};                            // of each query
  std::vector<bool> hidden{};                              // [n m] keys within the range that are not seen; empty: none
  std::vector<bool> dropped{};                             // [n m] elements of p that dropout drops; empty: none
  double dropout_scale = 1.0;                              // z of the others
  Matrix bias{};                                           // [n m] added to the logits: mask and ALiBi; empty: none
  std::vector<double> row_bias{};                          // [n] what else is; it meets lse alone; empty: 0
  double sink = -std::numeric_limits<double>::infinity();  // a logit of every query whose value is 0; -inf: none
  Seen seen_q{}, seen_k{};  // [n] [m]; a key counts as seen if any head that shares it sees it

  double row_bias_of(int64_t i) const { return row_bias.empty() ? 0.0 : row_bias[static_cast<std::size_t>(i)]; }

  // Returns whether dropout keeps p_ij.
  bool keeps(int64_t i, int64_t j) const {
    return dropped.empty() || !dropped[static_cast<std::size_t>(i * k.rows + j)];
  }

  bool sees(int64_t i, int64_t j) const {
    const KeyRange& range = keys[static_cast<std::size_t>(i)];
    return j >= range.first && j < range.last && (hidden.empty() || !hidden[static_cast<std::size_t>(i * k.rows + j)]);
  }
};

struct Output {
  Matrix o;                 // [n e], rounded only if the recipe has a point for it
  std::vector<double> lse;  // [n], natural, of the logits as the recipe rounds them; -inf: no key seen and no sink
  Matrix o_exact;           // o before its rounding point
};
Output forward(const Head& head, const Recipe& recipe);

struct Gradients {
  Matrix dq, dk, dv;
  double dsink = 0.0;
  Matrix dbias{};  // [n m], 0 where not seen
};
// `o`, `lse`: what the forward pass left, o with or without the residual as recipe.backward.exact_o says. `dlse`: [n],
// empty: 0.
Gradients backward(const Head& head, const Matrix& o, const std::vector<double>& lse, const Matrix& do_,
                   const Recipe& recipe, const std::vector<double>& dlse = {});

struct Tangents {
  Matrix q, k, v;
  double sink = 0.0;
};
struct JvpOutput {
  Output primal;
  Matrix to;
  std::vector<double> tlse;  // [n]
};
JvpOutput jvp(const Head& head, const Tangents& tangents, const Recipe& recipe);

}  // namespace octet::reference
