// Groups share the scale amax / largest quantized value; values are rounded to nearest, ties to even.
#include "cpu/reference/operands.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <octet/formats.hpp>

#include "core/quant/hadamard.h"
#include "core/quant/scale.h"

namespace octet::reference {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr Format kE2m1{1, 0, 6.0, true};

std::size_t index(int64_t i) { return static_cast<std::size_t>(i); }

void keep_larger(double& amax, double x) {
  if (std::isfinite(x)) amax = std::max(amax, std::fabs(x));
}

int64_t group_of(const Quantizer& quantizer, int64_t token, int64_t channel) {
  switch (quantizer.group) {
    case Group::block:
      return token / quantizer.block;
    case Group::token:
      return token;
    case Group::channel:
      return channel;
    case Group::thread_q:
      return token / 32 * 8 + token % 8;
    case Group::thread_k:
      return token / 64 * 4 + token % 8 / 2;
    default:
      return 0;
  }
}

void round_group_scaled(Matrix& x, const Quantizer& quantizer) {
  std::vector<double> amax(index(std::max(x.rows + 128, x.cols)), 0.0);
  for (int64_t t = 0; t < x.rows; ++t)
    for (int64_t c = 0; c < x.cols; ++c) keep_larger(amax[index(group_of(quantizer, t, c))], x[t][c]);
  for (int64_t t = 0; t < x.rows; ++t)
    for (int64_t c = 0; c < x.cols; ++c) {
      const double largest = amax[index(group_of(quantizer, t, c))];
      double& value = x[t][c];
      if (!std::isfinite(value))
        value = kNaN;
      else if (quantizer.group == Group::power_of_two)
        value = rounded_in_any_range(quantizer.format, value);
      else
        value = rounded_on(quantizer.format, value, largest);
    }
}

void hadamard_stages(double* x, int64_t dim) {
  const int64_t block = hadamard_block(dim);
  for (int64_t half = 1; half < block; half *= 2)
    for (int64_t start = 0; start < dim; start += 2 * half)
      for (int64_t c = start; c < start + half; ++c) {
        const double a = x[c], b = x[c + half];
        x[c] = a + b, x[c + half] = a - b;
      }
  for (int64_t c = 0; c < dim; ++c) x[c] /= std::sqrt(static_cast<double>(block));
}

}  // namespace

double largest_quantized(octet_dtype format) {
  switch (format) {
    case OCTET_I8:
      return 127.0;
    case OCTET_U8:
      return 255.0;
    case OCTET_I4:
      return 7.0;
    case OCTET_E4M3:
      return 448.0;
    case OCTET_E5M2:
      return 57344.0;
    default:
      return 1.0;
  }
}

double rounded_to(octet_dtype format, double x) { return std::isnan(x) ? x : round_to(format, x); }

double rounded_in_any_range(octet_dtype format, double x) {
  if (x == 0.0 || !std::isfinite(x)) return x;
  // The power of two of x, or the least normal one.
  const auto exponent = std::max<uint64_t>(std::bit_cast<uint64_t>(x) >> 52 & 0x7ff, 1);
  const auto unit = std::bit_cast<double>(exponent << 52);
  return round_to(format, x / unit) * unit;
}

double rounded_on(octet_dtype format, double x, double largest) {
  if (largest == 0.0) return std::isnan(x) ? x : 0.0;
  const double scale = largest / largest_quantized(format);
  return rounded_to(format, x / scale) * scale;
}

void round_nvfp4(double* p, int64_t n, int64_t stride, double unit) {
  for (int64_t first = 0; first < n; first += 16) {
    const int64_t last = std::min(n, first + 16);
    double amax = 0.0;
    for (int64_t j = first; j < last; ++j) keep_larger(amax, p[j * stride]);
    const double scale = amax / 6.0 / unit, stored = round_to(kE4m3, scale);
    for (int64_t j = first; j < last; ++j) {
      double& value = p[j * stride];
      if (!std::isnan(value)) value = stored == 0.0 ? 0.0 : round_to(kE2m1, value / unit / stored) * stored * unit;
    }
  }
}

Matrix quantized(const Matrix& x, const Quantizer& quantizer, const Seen& seen) {
  Matrix y = x;
  for (int64_t t = 0; t < y.rows; ++t)
    if (!sees_token(seen, t)) std::fill_n(y[t], y.cols, 0.0);
  if (quantizer.exact()) return y;
  if (quantizer.group == Group::cast)
    for (double& value : y.data) value = rounded_to(quantizer.format, value);
  else if (quantizer.group == Group::nvfp4_dim)
    for (int64_t t = 0; t < y.rows; ++t) round_nvfp4(y[t], y.cols, 1, 1.0);
  else if (quantizer.group == Group::nvfp4_token)
    for (int64_t c = 0; c < y.cols; ++c) round_nvfp4(y.data.data() + c, y.rows, y.cols, 1.0);
  else
    round_group_scaled(y, quantizer);
  return y;
}

std::vector<double> channel_means(const Matrix& x, const Seen& seen, int64_t first_token, int64_t last_token) {
  std::vector<double> mean(index(x.cols), 0.0);
  std::vector<int64_t> tokens;
  for (int64_t t = first_token; t < last_token; ++t)
    if (sees_token(seen, t)) tokens.push_back(t);
  const auto count = static_cast<int64_t>(tokens.size()), sampled = std::min(count, kSampledTokens);
  std::vector<float> largest;
  for (int64_t i = 0; i < sampled; ++i) {
    double amax = 0.0;
    for (int64_t c = 0; c < x.cols; ++c) keep_larger(amax, x[tokens[index(i * count / sampled)]][c]);
    largest.push_back(static_cast<float>(amax));
  }
  const double limit = mean_limit(largest.data(), sampled);
  for (int64_t t : tokens)
    for (int64_t c = 0; c < x.cols; ++c)
      if (std::fabs(x[t][c]) < limit) mean[index(c)] += x[t][c];
  for (double& sum : mean) sum /= static_cast<double>(std::max<int64_t>(count, 1));
  return mean;
}

void subtract(Matrix& x, const std::vector<double>& mean, const Seen& seen, int64_t first, int64_t last) {
  for (int64_t t = first; t < last; ++t)
    if (sees_token(seen, t)) add_scaled(x[t], -1.0, mean.data(), x.cols);
}

std::vector<double> token_amax(const Matrix& x) {
  std::vector<double> amax(index(x.rows), 0.0);
  for (int64_t t = 0; t < x.rows; ++t)
    for (int64_t c = 0; c < x.cols; ++c) keep_larger(amax[index(t)], x[t][c]);
  return amax;
}

Matrix rotated(Matrix x, uint64_t seed) {
  for (int64_t t = 0; t < x.rows; ++t) {
    for (int64_t c = 0; c < x.cols; ++c) x[t][c] *= hadamard_sign(seed, c);
    hadamard_stages(x[t], x.cols);
  }
  return x;
}

Matrix rotated_back(Matrix x, uint64_t seed) {
  for (int64_t t = 0; t < x.rows; ++t) {
    hadamard_stages(x[t], x.cols);
    for (int64_t c = 0; c < x.cols; ++c) x[t][c] *= hadamard_sign(seed, c);
  }
  return x;
}

Smoothed::Smoothed(const Matrix& from, int64_t tokens, const Seen& seen)
    : x(from), block(std::min(tokens, std::max<int64_t>(from.rows, 1))) {
  if (!tokens) return;
  means = Matrix((x.rows + block - 1) / block, x.cols);
  for (int64_t b = 0; b < means.rows; ++b) {
    const int64_t first = b * block, last = std::min(x.rows, first + block);
    const std::vector<double> mean = channel_means(x, seen, first, last);
    std::copy(mean.begin(), mean.end(), means[b]);
    subtract(x, mean, seen, first, last);
  }
}

Logits::Logits(const Head& head, const LogitRecipe& recipe)
    : head_(head), smooth_q_(head.q, recipe.smooth_q, head.seen_q), smooth_k_(head.k, recipe.smooth_k, head.seen_k) {
  const auto rounded = [&](const Matrix& x, const Quantizer& quantizer, const Seen& seen) {
    return quantized(recipe.hadamard ? rotated(x, kHadamardSeed) : x, quantizer, seen);
  };
  q_rounded_ = rounded(smooth_q_.x, recipe.q, head.seen_q);
  k_rounded_ = rounded(smooth_k_.x, recipe.k, head.seen_k);
  k_rounded_transposed_ = transposed(k_rounded_);
  if (recipe.smooth_q) k_smoothed_transposed_ = transposed(smooth_k_.x);
}

void Logits::row(int64_t i, bool scale_first, double* s, double* derivative) const {
  const KeyRange range = head_.keys[index(i)];
  const int64_t count = range.last - range.first, d = head_.q.cols;
  std::fill(s + range.first, s + range.last, 0.0);
  add_rows(s + range.first, q_rounded_[i], k_rounded_transposed_, range.first, count);
  if (smooth_q_.means.rows) add_rows(s + range.first, smooth_q_.mean_of(i), k_smoothed_transposed_, range.first, count);
  if (smooth_k_.means.rows) {
    std::vector<double> of_block;
    for (int64_t b = 0; b < smooth_k_.means.rows; ++b) of_block.push_back(dot(head_.q[i], smooth_k_.means[b], d));
    for (int64_t j = range.first; j < range.last; ++j) s[j] += of_block[index(j / smooth_k_.block)];
  }
  if (scale_first)
    for (int64_t j = range.first; j < range.last; ++j) s[j] *= head_.scale;
  if (derivative) std::fill(derivative + range.first, derivative + range.last, 1.0);
  if (head_.softcap != 0.0) {
    const double cap = scale_first ? head_.softcap : head_.softcap / head_.scale;
    for (int64_t j = range.first; j < range.last; ++j) {
      const double t = std::isfinite(s[j]) ? std::tanh(s[j] / cap) : kNaN;
      if (derivative) derivative[j] = 1.0 - t * t;
      s[j] = cap * t;
    }
  }
  if (head_.bias.rows)
    add_scaled(s + range.first, scale_first ? 1.0 : 1.0 / head_.scale, head_.bias[i] + range.first, count);
}

Values::Values(const Matrix& x, const Recipe& recipe, const Seen& seen) : v(x) {
  if (recipe.smooth_v) {
    mean = channel_means(v, seen, 0, v.rows);
    subtract(v, mean, seen, 0, v.rows);
  }
  v = quantized(v, recipe.v, seen);
  if (!recipe.fold_v) return;
  token_scale = token_amax(v);
  for (int64_t t = 0; t < v.rows; ++t) {
    token_scale[index(t)] /= largest_quantized(recipe.v.format);
    if (token_scale[index(t)] > 0.0)
      for (int64_t c = 0; c < v.cols; ++c) v[t][c] /= token_scale[index(t)];
  }
}

}  // namespace octet::reference
