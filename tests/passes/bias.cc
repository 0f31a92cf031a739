#include "passes/bias.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>

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

}  // namespace octet::test
