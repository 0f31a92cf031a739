// A sink is one more logit of every query, whose value is 0. This is what it makes of lse and of probabilities.
//
// Every function is `static`, as in core/quant.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

namespace octet {

// log(exp(lse) + exp(sink)): what a sink makes of the lse of a row's keys. A sink that is NaN or +inf makes it NaN, as
// such a logit would; one of -inf is none.
static inline double with_sink(double lse, double sink) {
  if (!(sink < std::numeric_limits<double>::infinity())) return std::numeric_limits<double>::quiet_NaN();
  if (lse != lse) return lse;
  const double low = std::fmin(lse, sink), high = std::fmax(lse, sink);
  return low == -std::numeric_limits<double>::infinity() ? high : high + std::log1p(std::exp(low - high));
}

// exp(x - lse), the probability of a logit; 0 where the logit is -inf, whatever lse is. It is at most 1, also where lse
// as it was stored lies below a large logit.
static inline double probability_of(double x, double lse) {
  return x == -std::numeric_limits<double>::infinity() ? 0.0 : std::exp(std::min(x - lse, 0.0));
}

}  // namespace octet
