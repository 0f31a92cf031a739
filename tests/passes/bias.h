// Bias of delta = sum do o on rows with tied maxima (tied_inputs), where rounding o errs the same way in every row.
#pragma once
#include "passes/bars.h"

namespace octet::test {

enum class Tied { s7, s8 };

// From the un-rounded o: kappa <= .1 and |t| <= 4. On S7 rounding o once is unbiased as it is: nothing to cure, and
// nothing to spoil. On S8 it is biased, kappa >= .5.
void expect_unbiased_delta(const Tested&, Tied);

// Expects that a bias correction takes the bias from dq on S8: without it its errors have one sign, kappa >= 0.5; with
// it a tenth of them is left.
void expect_unbiased_dq_on_s8(const Tested&, BiasCorrection);

// Bias correction beta with a factor of 3: from o as it is stored, on S8, kappa <= .1 and |t| <= 4.
void expect_that_beta_cures_delta_on_s8(const Tested&);

// Bias correction beta where all keys of a row tie for a logit of up to 48 and down to -48: o is the mean of v times
// what rounding P does to it, P = exp(r - m) with m as docs/numerics.md states it.
void expect_that_beta_moves_ties_as_stated(const Tested&, Precision);

}  // namespace octet::test
