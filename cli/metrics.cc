// Distances between results.
#include "metrics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <octet/formats.hpp>

namespace octet::cli {
namespace {

double largest(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return kF32.largest;
    case DType::f16:
      return kF16.largest;
    case DType::bf16:
      return kBf16.largest;
    case DType::e4m3:
      return kE4m3.largest;
    case DType::e5m2:
      return kE5m2.largest;
    default:
      return std::numeric_limits<double>::max();
  }
}

// Sums over a set of pairs (a, b), with e = a - b.
struct Sums {
  double ab = 0, aa = 0, bb = 0, ee = 0, e = 0, b = 0, max = 0;

  void add(double x, double y) {
    const double error = x - y;
    ab += x * y, aa += x * x, bb += y * y, ee += error * error, e += std::fabs(error), b += std::fabs(y);
    max = std::isnan(error) ? error : std::max(max, std::fabs(error));
  }
  void add(const Sums& s) {
    ab += s.ab, aa += s.aa, bb += s.bb, ee += s.ee, e += s.e, b += s.b;
    max = std::isnan(s.max) ? s.max : std::max(max, s.max);
  }
};

double ratio(double error, double size) { return error == 0 ? 0 : error / size; }

}  // namespace

Errors compare(const Array& got, const Array& want) {
  const Shape shape = got.shape4();
  const Tensor view = got.view();
  const double limit = largest(got.dtype);
  Errors out;
  Sums total;
  for (int64_t head = 0; head < shape[0] * shape[1]; ++head) {
    const int64_t first = head / shape[1] * view.stride[0] + head % shape[1] * view.stride[1];
    Sums sums;
    for (int64_t j = 0; j < shape[2] * shape[3]; ++j) {
      const int64_t i = first + j / shape[3] * view.stride[2] + j % shape[3];
      const double x = got[i], y = want[i];
      out.nan += std::isnan(x);
      out.saturated += std::isinf(x) ? std::isfinite(y) : std::fabs(x) >= limit && std::fabs(y) > limit;
      if ((std::isnan(x) && std::isnan(y)) || (std::isinf(x) && x == y)) continue;
      sums.add(x, y);
    }
    const double rel_l2 = ratio(std::sqrt(sums.ee), std::sqrt(sums.bb));
    if (!std::isnan(out.worst_head_rel_l2) && !(rel_l2 <= out.worst_head_rel_l2)) out.worst_head_rel_l2 = rel_l2;
    total.add(sums);
  }
  out.rel_l1 = ratio(total.e, total.b);
  out.rel_l2 = ratio(std::sqrt(total.ee), std::sqrt(total.bb));
  out.max_abs = total.max;
  out.cos = total.ee == 0 ? 1 : total.ab / std::sqrt(total.aa * total.bb);
  return out;
}

void Bias::add_output(double got, double want, int mantissa_bits) {
  if (want == 0 || !std::isfinite(want)) return;
  const double ulp = std::ldexp(1.0, std::ilogb(want) - mantissa_bits);
  const double outward = (got - want) / ulp * (want < 0 ? -1 : 1);
  sum_ += outward, squares_ += outward * outward, ++count_;
}

void Bias::add_delta(double got, double want) {
  delta_sum_ += got - want, delta_absolute_ += std::fabs(got - want), delta_size_ += std::fabs(want);
}

double Bias::outward_ulps() const { return count_ ? sum_ / static_cast<double>(count_) : 0; }

double Bias::t() const {
  if (count_ == 0) return 0;
  const double n = static_cast<double>(count_), mean = outward_ulps();
  const double variance = std::max(0.0, squares_ / n - mean * mean);
  return mean == 0 ? 0 : mean / std::sqrt(variance / n);
}

double Bias::kappa() const { return ratio(std::fabs(delta_sum_), delta_absolute_); }

double Bias::delta_mean() const { return ratio(delta_sum_, delta_size_); }

}  // namespace octet::cli
