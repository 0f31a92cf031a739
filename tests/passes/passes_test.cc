// Every pass of every precision on the CPU against float64, with no tolerance picked by hand.
//
// `exact` is unfused float64 attention. `plain` is unfused attention that rounds where the precision must round: its
// error is the price of the format. The fast kernel may err twice as much, plus what f32 arithmetic may add
// (f32_noise): it rounds the same quantities, computed in another order. It must moreover agree with `plain` itself far
// better than either agrees with float64: only where f32 arithmetic falls on the other side of a rounding boundary do
// they part. (Not so with bf16 P, which a kernel may round against an older maximum: docs/numerics.md.) Both are
// computed once for the kernels of all instruction sets.
#include <gtest/gtest.h>

#include "support/cases.h"
#include "support/instruction_sets.h"

namespace octet::test {
namespace {

struct Compared {
  const char* name;
  const Values *got, *plain, *exact;
  double rms_noise, largest_noise;
  bool same_p;  // rounded against the same maximum
};

Values sum_of(const Values& o, const Values& residual) {
  return residual.present() ? combined(1, o, 1, residual) : Values();
}

void expect_as_good(const Compared& x) {
  if (x.exact->data.empty()) return;
  const Difference got = difference(*x.got, *x.exact), plain = difference(*x.plain, *x.exact),
                   both = difference(*x.got, *x.plain);
  EXPECT_LE(got.rms, 2 * plain.rms + x.rms_noise) << x.name << ": rms error, plain rounding " << plain.rms
                                                  << ", f32 noise " << x.rms_noise << "; worst " << text(got) << "\n";
  EXPECT_LE(got.largest, 2 * plain.largest + x.largest_noise)
      << x.name << ": largest error, plain rounding " << plain.largest << ", f32 noise " << x.largest_noise << "; "
      << text(got) << "\n";
  if (!x.same_p) return;
  EXPECT_LE(both.rms, plain.rms / 4 + x.rms_noise) << x.name << ": rms distance to plain rounding, whose own error is "
                                                   << plain.rms << "; worst " << text(both) << "\n";
}

// The results that a case's pass is compared with.
struct Expected {
  Outputs exact, plain;
  Noise rms, most;
  bool same_p = true;
};

void expect_as_good(const Outputs& got, const Expected& x, Pass pass) {
  if (pass == Pass::backward) {
    expect_as_good({"dq", &got.dq, &x.plain.dq, &x.exact.dq, x.rms.dq, x.most.dq, x.same_p});
    expect_as_good({"dk", &got.dk, &x.plain.dk, &x.exact.dk, x.rms.dk, x.most.dk, x.same_p});
    expect_as_good({"dv", &got.dv, &x.plain.dv, &x.exact.dv, x.rms.dv, x.most.dv, x.same_p});
    expect_as_good({"dsinks", &got.dsinks, &x.plain.dsinks, &x.exact.dsinks, x.rms.dsinks, x.most.dsinks, x.same_p});
    expect_as_good({"dmask", &got.dmask, &x.plain.dmask, &x.exact.dmask, x.rms.dmask, x.most.dmask, x.same_p});
    return;
  }
  expect_as_good({"o", &got.o, &x.plain.o, &x.exact.o, x.rms.o, x.most.o, x.same_p});
  expect_as_good({"lse", &got.lse, &x.plain.lse, &x.exact.lse, x.rms.lse, x.most.lse, x.same_p});
  if (pass == Pass::jvp) {
    expect_as_good({"to", &got.to, &x.plain.to, &x.exact.to, x.rms.to, x.most.to, x.same_p});
    expect_as_good({"tlse", &got.tlse, &x.plain.tlse, &x.exact.tlse, x.rms.tlse, x.most.tlse, x.same_p});
  }
  if (!got.o_residual.present()) return;
  const Values got_o = sum_of(got.o, got.o_residual), plain_o = sum_of(x.plain.o, x.plain.o_residual);
  expect_as_good({"o + o_residual", &got_o, &plain_o, &x.exact.o, x.rms.o, x.most.o, x.same_p});
}

// A precision, and at 16 bits a bias correction: each gives p and ds other formats, or dq and dk another product. With
// sinks, dlse or a softcap all of them: each has a delta, row sums of ds and a range of its own.
struct Recipe {
  Precision precision;
  BiasCorrection bias_correction = BiasCorrection::f16;
};

std::vector<Recipe> recipes_of(Pass pass, const Case& c) {
  std::vector<Recipe> list;
  for (Precision precision : precisions_of(pass)) list.push_back({precision});
  if (pass == Pass::forward) list.push_back({Precision::bf16, BiasCorrection::none});
  if (pass == Pass::backward) list.push_back({Precision::bf16, BiasCorrection::gproj});
  if (c.sinks == Sinks::none && !c.dlse && c.softcap == 0) return list;
  for (const Precision precision : {Precision::f16, Precision::bf16}) {
    if (pass == Pass::forward) list.push_back({precision, BiasCorrection::beta});
    if (pass == Pass::backward)
      list.push_back({precision, BiasCorrection::none}), list.push_back({precision, BiasCorrection::exact_delta});
  }
  if (pass == Pass::backward) list.push_back({Precision::f16, BiasCorrection::gproj});
  return list;
}

const char* with(BiasCorrection bias_correction) {
  return bias_correction == BiasCorrection::none          ? ", none"
         : bias_correction == BiasCorrection::beta        ? ", beta"
         : bias_correction == BiasCorrection::exact_delta ? ", exact_delta"
         : bias_correction == BiasCorrection::gproj       ? ", gproj"
                                                          : "";
}

class Passes : public testing::TestWithParam<std::tuple<size_t, Pass>> {};

TEST_P(Passes, errs_at_most_twice_as_much_as_plain_rounding) {
  const auto [index, pass] = GetParam();
  const Case& c = cases()[index];
  const uint64_t seed = index + 1;
  const Inputs in = draw(c, seed);
  const double column_sum = pass == Pass::backward ? largest_column_sum(c, in) : 0.0;
  Expected expected{exact(c, in, pass), {}, f32_noise(c, in, column_sum, 1.0), f32_noise(c, in, column_sum, 5.0)};
  for (const auto& [precision, bias_correction] : recipes_of(pass, c)) {
    SCOPED_TRACE(testing::Message() << "case " << c.name << ", " << name(pass) << ' ' << name(precision)
                                    << with(bias_correction) << ", seed " << seed);
    Attention plain = attention_of(c, precision, "reference"), fast = attention_of(c, precision, "cpu");
    plain.bias_correction = fast.bias_correction = bias_correction;
    expected.same_p = pass != Pass::forward || bias_correction == BiasCorrection::f16;
    Outputs saved;
    try {
      if (pass == Pass::backward) saved = run(c, in, plain, Pass::forward);
      expected.plain = run(c, in, plain, pass, &saved);
    } catch (const Error& error) {
      ADD_FAILURE() << "reference rejects: " << error.what();
      continue;
    }
    for (const std::string& isa : instruction_sets()) {
      SCOPED_TRACE(isa);
      const OnInstructionSet on(isa);
      try {
        expect_as_good(run(c, in, fast, pass, &saved), expected, pass);
      } catch (const Error& error) {
        ADD_FAILURE() << "cpu rejects: " << error.what();
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Passes,
                         testing::Combine(testing::Range<size_t>(0, cases().size()),
                                          testing::Values(Pass::forward, Pass::backward, Pass::jvp)),
                         [](const auto& info) {
                           return std::string(name(std::get<1>(info.param))) + '_' +
                                  cases()[std::get<0>(info.param)].name;
                         });

}  // namespace
}  // namespace octet::test
