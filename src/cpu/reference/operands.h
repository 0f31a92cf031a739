// Operands: smoothing, rotation and rounding of whole matrices of one head, and the logits they make.
#pragma once
#include "core/recipe.h"
#include "cpu/reference/attention.h"
#include "cpu/reference/matrix.h"

namespace octet::reference {

// The largest quantized value of a format: what a group's largest magnitude is scaled to.
double largest_quantized(octet_dtype format);

// The number of a format nearest to x; NaN stays NaN in every format.
double rounded_to(octet_dtype format, double x);

// The nearest number with the format's bits, in any range: each number has a power of two of its own.
double rounded_in_any_range(octet_dtype format, double x);

// x rounded to a quantized value times its scale, where `largest` is what the largest quantized value stands for.
double rounded_on(octet_dtype format, double x, double largest);

// Rounds the n values of p in place to nvfp4: groups of 16, values e2m1 * e4m3 * unit.
void round_nvfp4(double* p, int64_t n, int64_t stride, double unit);

// x as its quantizer keeps it. A number that is not finite becomes NaN in formats with a scale and has no part in it,
// so that it stays in its token. Tokens that are not seen have no part in anything and become 0.
Matrix quantized(const Matrix& x, const Quantizer& quantizer, const Seen& seen = {});

// The mean over the seen tokens of [first_token, last_token) of each channel; numbers of mean_limit
// (core/quant/scale.h) and above, and those that are not finite, count as 0.
std::vector<double> channel_means(const Matrix& x, const Seen& seen, int64_t first_token, int64_t last_token);

// x minus a mean, for the seen tokens of [first, last).
void subtract(Matrix& x, const std::vector<double>& mean, const Seen& seen, int64_t first, int64_t last);

// Largest finite magnitude of each token.
std::vector<double> token_amax(const Matrix& x);

// Rotates each token by the random-sign Hadamard matrix of a seed (core/quant/hadamard.h), or back.
Matrix rotated(Matrix x, uint64_t seed);
Matrix rotated_back(Matrix x, uint64_t seed);

// Means over the seen ones of each `block` consecutive tokens, and x minus them; block 0: x itself. Tokens that are not
// seen stay as they are.
struct Smoothed {
  Smoothed(const Matrix& x, int64_t block, const Seen& seen);

  Matrix x;
  Matrix means;  // [blocks d]; no rows if not smoothed
  int64_t block;

  const double* mean_of(int64_t token) const { return means[token / block]; }
};

// The operands of s = scale q k^T: with q = q' + q_mean, k = k' + k_mean,
//   q.k = q'.k' + q_mean.k' + q.k_mean, of which only the first product is one of rounded operands.
class Logits {
 public:
  Logits(const Head& head, const LogitRecipe& recipe);

  // q.k of query i and every key of its range, capped and with the bias, in units of scale * q.k or of q.k; entries of
  // keys that the query does not see are of no value. `derivative`: by q.k without the cap, where it is not null.
  void row(int64_t i, bool scale_first, double* s, double* derivative = nullptr) const;

  const Matrix& q() const { return q_rounded_; }  // q' and k', rounded, in the rotated frame if rotated
  const Matrix& k() const { return k_rounded_; }
  const Smoothed& smooth_q() const { return smooth_q_; }
  const Smoothed& smooth_k() const { return smooth_k_; }

 private:
  const Head& head_;
  Smoothed smooth_q_, smooth_k_;
  Matrix q_rounded_, k_rounded_;
  Matrix k_rounded_transposed_, k_smoothed_transposed_;
};

// The operand v of o = p v.
struct Values {
  Values(const Matrix& v, const Recipe& recipe, const Seen& seen);

  Matrix v;                         // rounded; integers without their scales if folded
  std::vector<double> token_scale;  // folded: the scale of each token
  std::vector<double> mean;         // smoothed: o adds it back
};

}  // namespace octet::reference
