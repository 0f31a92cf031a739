// How far a result is from float64, in the figures that attention papers report.
#pragma once
#include <cstdint>

#include "array.h"

namespace octet::cli {

struct Errors {
  double cos = 1;                 // over all elements
  double rel_l1 = 0, rel_l2 = 0;  // sum|a-b| / sum|b|, ||a-b|| / ||b||; 0 / 0 is 0
  double max_abs = 0;
  double worst_head_rel_l2 = 0;  // the largest rel_l2 of a (batch, head)
  int64_t nan = 0;               // elements that are NaN
  int64_t saturated =
      0;  // elements clamped to the largest number of their type, or infinite where the reference is not
};

// `got` and `want` are [batch, head, token, dim] of one shape and layout. Pairs of equal infinities or two NaN do not
// count in the distances; a NaN or infinity on one side alone makes them NaN or infinite.
Errors compare(const Array& got, const Array& want);

// Error of o in units of its format's last place, counted outward (away from zero), and of delta = rowsum(do * o).
class Bias {
 public:
  void add_output(double got, double want, int mantissa_bits);
  void add_delta(double got, double want);

  double outward_ulps() const;  // mean
  double t() const;             // of that mean against 0
  double kappa() const;         // |sum e| / sum |e| of delta's errors: 0 unbiased, 1 coherent; 0 if all are exact
  double delta_mean() const;    // sum e / sum |delta|: what is left of delta's errors when they add up over rows

 private:
  double sum_ = 0, squares_ = 0, delta_sum_ = 0, delta_absolute_ = 0, delta_size_ = 0;
  int64_t count_ = 0;
};

}  // namespace octet::cli
