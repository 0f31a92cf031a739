#include "passes/bias.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <octet/formats.hpp>

#include "support/metrics.h"

namespace octet::test {
namespace {

std::vector<Inputs> inputs(Tied tied) { return tied_inputs(tied == Tied::s8); }

// The error of delta of one row, which is a head, against float64's o.
double delta_error(const Inputs& in, const Values& o, const Values& exact_o, int64_t head) {
  double error = 0.0;
  for (int64_t i = 0; i < o.shape[3]; ++i)
    error += in.do_.at(0, head, 0, i) * (o.at(0, head, 0, i) - exact_o.at(0, head, 0, i));
  return error;
}

// The results of a forward pass with the default bias correction, and float64's o.
struct Kept {
  Values o, unrounded_o, exact_o;
};

Kept kept(const Tested& tested, const Case& c, const Inputs& in) {
  const Outputs out = run_on(tested, c, in, attention_of(c, Precision::bf16, tested.backend), Pass::forward);
  return {out.o, combined(1, out.o, 1, out.o_residual), exact(c, in, Pass::forward).o};
}

void expect_unbiased(const Bias& bias) {
  EXPECT_LE(bias.kappa(), .1);
  EXPECT_LE(std::fabs(bias.t()), 4.0);
}

}  // namespace

void expect_unbiased_delta(const Tested& tested, Tied tied) {
  const Case c = tied_case();
  Bias from_o, from_unrounded_o;
  for (const Inputs& in : inputs(tied)) {
    const Kept x = kept(tested, c, in);
    for (int64_t h = 0; h < c.heads; ++h) {
      from_o.add(delta_error(in, x.o, x.exact_o, h));
      from_unrounded_o.add(delta_error(in, x.unrounded_o, x.exact_o, h));
    }
  }
  std::printf("  delta from the un-rounded o: kappa %.3f, t %.1f; from o: kappa %.3f\n", from_unrounded_o.kappa(),
              from_unrounded_o.t(), from_o.kappa());
  expect_unbiased(from_unrounded_o);
  if (tied == Tied::s8) {
    EXPECT_GE(from_o.kappa(), .5) << "without a bias correction: the test has no power";
  }
}

// The first channel of dq moves by -(error of delta) * scale * (sum_j P_ij k_j minus any constant), of one sign here.
// For dq no bar is known: its own rounding, in no proportion to that of delta, may lean to one side. The errors that
// add up over rows are at most a tenth of those that the bias correction is for.
void expect_unbiased_dq_on_s8(const Tested& tested, BiasCorrection bias_correction) {
  const Case c = tied_case();
  Bias naive, corrected;
  for (const Inputs& in : inputs(Tied::s8)) {
    const Values want = exact(c, in, Pass::backward).dq;
    const auto add = [&](Bias& bias, BiasCorrection correction) {
      const Values dq = compute(tested, c, in, Pass::backward, Precision::bf16, DType::bf16, correction).dq;
      for (int64_t h = 0; h < c.heads; ++h) bias.add(dq.at(0, h, 0, 0) - want.at(0, h, 0, 0));
    };
    add(naive, BiasCorrection::none), add(corrected, bias_correction);
  }
  EXPECT_GE(naive.kappa(), .5) << "without a bias correction: the test has no power";
  EXPECT_LE(std::fabs(corrected.mean()), .1 * std::fabs(naive.mean()));
}

void expect_that_beta_cures_delta_on_s8(const Tested& tested) {
  const Case c = tied_case();
  Bias naive, cured;
  for (const Inputs& in : inputs(Tied::s8)) {
    const Values want = exact(c, in, Pass::forward).o;
    const auto add = [&](Bias& bias, BiasCorrection bias_correction, float beta) {
      Attention attention = attention_of(c, Precision::bf16, tested.backend);
      attention.bias_correction = bias_correction, attention.beta = beta;
      const Values o = run_on(tested, c, in, attention, Pass::forward).o;
      for (int64_t h = 0; h < c.heads; ++h) bias.add(delta_error(in, o, want, h));
    };
    add(naive, BiasCorrection::none, 0.f), add(cured, BiasCorrection::beta, 3.f);
  }
  EXPECT_GE(naive.kappa(), .5) << "without a bias correction: the test has no power";
  expect_unbiased(cured);
}

// All P of a row are equal, so that o / mean(v) is fl(P) / P, l being exact. A P that float32 takes to the other side
// of the middle between two numbers of the format rounds the other way: rows that close to it are left out.
void expect_that_beta_moves_ties_as_stated(const Tested& tested, Precision precision) {
  const bool f16 = precision == Precision::f16;
  const DType type = f16 ? DType::f16 : DType::bf16;
  const double limit = f16 ? 4.0 : 40.0;
  constexpr int64_t kSteps = 81, kQueries = 2 * kSteps;
  const auto logit = [](int64_t i) { return (i < kSteps ? 1 : -1) * (8.0 + .5 * static_cast<double>(i % kSteps)); };
  const Case c{.name = "ties", .tokens_q = kQueries, .tokens_k = 150, .scale = 1.f, .dtype = type};
  Inputs in = draw(c, 1);
  for (double& x : in.q.data) x = 0.0;
  for (double& x : in.k.data) x = 0.0;
  for (int64_t i = 0; i < kQueries; ++i) in.q.at(0, 0, i, 0) = logit(i);
  for (int64_t j = 0; j < c.tokens_k; ++j) in.k.at(0, 0, j, 0) = 1.0;
  const double keys = static_cast<double>(c.tokens_k);
  for (const float beta : {2.f, 3.f, 7.f}) {
    Attention attention = attention_of(c, precision, tested.backend);
    attention.bias_correction = BiasCorrection::beta, attention.beta = beta;
    const Values o = run_on(tested, c, in, attention, Pass::forward).o;
    int64_t rows = 0;
    for (int64_t i = 0; i < kQueries; ++i) {
      const double r = logit(i), m = std::min(r > 0 ? beta * r : 0.0, r + limit), p = std::exp(r - m);
      // The argument of exp in float32, m and the factor log2(e) rounded; and exp2 (docs/numerics.md).
      const double e = 2 * 0x1p-24 * (std::fabs(r) + std::fabs(m)) + 3.5e-6;
      const double factor = round_to(f16 ? kF16 : kBf16, p) / p;
      if (factor != round_to(f16 ? kF16 : kBf16, p * (1 + e)) / p ||
          factor != round_to(f16 ? kF16 : kBf16, p * (1 - e)) / p)
        continue;
      ++rows;
      const double bar = 2 * e + 5 * std::sqrt(keys) * 0x1p-24 + 0x1p-22;
      for (int64_t channel = 0; channel < c.dim_v; ++channel) {
        double sum = 0.0, size = 0.0;
        for (int64_t j = 0; j < c.tokens_k; ++j) {
          const double v = in.v.at(0, 0, j, channel);
          sum += v, size += std::fabs(v);
        }
        ASSERT_NEAR(o.at(0, 0, i, channel), factor * sum / keys, bar * size / keys)
            << "all keys at " << r << ", beta " << beta << ", channel " << channel << ", fl(P) / P " << factor;
      }
    }
    // A P is left out with a probability of 2 e / 2^-9 in bf16, 2 e / 2^-12 in f16, e being below 2.3e-5.
    EXPECT_GE(rows, kQueries * (f16 ? 7 : 9) / 10);
  }
}

}  // namespace octet::test
