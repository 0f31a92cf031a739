// How far one array of numbers is from another, and whether a series of errors has a direction.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace octet::test {

struct Distance {
  double cos = 0.0;     // of the angle between the two
  double rel_l1 = 0.0;  // sum |got - want| / sum |want|
  double rel_l2 = 0.0;  // |got - want| / |want|
  double rms = 0.0;     // of got - want
  double max = 0.0;     // of |got - want|
};

inline Distance distance(const std::vector<double>& got, const std::vector<double>& want) {
  double gw = 0.0, gg = 0.0, ww = 0.0, error1 = 0.0, norm1 = 0.0, error2 = 0.0;
  Distance d;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double e = got[i] - want[i];
    gw += got[i] * want[i], gg += got[i] * got[i], ww += want[i] * want[i];
    error1 += std::fabs(e), norm1 += std::fabs(want[i]), error2 += e * e;
    d.max = std::isnan(e) ? e : std::max(d.max, std::fabs(e));
  }
  d.cos = gw / std::sqrt(gg * ww);
  d.rel_l1 = error1 / norm1;
  d.rel_l2 = std::sqrt(error2 / ww);
  d.rms = std::sqrt(error2 / static_cast<double>(want.size()));
  return d;
}

// Errors as they come in; are they noise, or do they push one way?
class Bias {
 public:
  void add(double error) { sum_ += error, absolute_ += std::fabs(error), squares_ += error * error, count_ += 1.0; }

  double mean() const { return sum_ / count_; }
  // Coherence |sum e| / sum |e|: 1 if all errors have one sign, near 0 if they cancel.
  double kappa() const { return absolute_ > 0.0 ? std::fabs(sum_) / absolute_ : 0.0; }
  // Student's t of the mean against 0.
  double t() const {
    const double variance = squares_ / count_ - mean() * mean();
    return variance > 0.0 ? mean() / std::sqrt(variance / count_) : 0.0;
  }

 private:
  double sum_ = 0.0, absolute_ = 0.0, squares_ = 0.0, count_ = 0.0;
};

}  // namespace octet::test
