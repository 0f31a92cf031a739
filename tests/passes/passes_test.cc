// Every pass of every precision on the CPU against float64, with no tolerance picked by hand.
//
// `exact` is unfused float64 attention. `plain` is unfused attention that rounds where the precision must round: its
// error is the price of the format. The fast kernel may err twice as much, plus what f32 arithmetic may add
// (f32_noise): it rounds the same quantities, computed in another order. It must moreover agree with `plain` itself far
// better than either agrees with float64: only where f32 arithmetic falls on the other side of a rounding boundary do
// they part.
#include <gtest/gtest.h>

#include "support/cases.h"

namespace octet::test {
namespace {

struct Compared {
  const char* name;
  const Values *got, *plain, *exact;
  double rms_noise, largest_noise;
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
  EXPECT_LE(both.rms, plain.rms / 4 + x.rms_noise) << x.name << ": rms distance to plain rounding, whose own error is "
                                                   << plain.rms << "; worst " << text(both) << "\n";
}

class Passes : public testing::TestWithParam<std::tuple<size_t, Pass>> {};

TEST_P(Passes, errs_at_most_twice_as_much_as_plain_rounding) {
  const auto [index, pass] = GetParam();
  const Case& c = cases()[index];
  const uint64_t seed = index + 1;
  const Inputs in = draw(c, seed);
  const Outputs want = exact(c, in, pass);
  const double column_sum = pass == Pass::backward ? largest_column_sum(c, in) : 0.0;
  const Noise rms = f32_noise(c, in, column_sum, 1.0), most = f32_noise(c, in, column_sum, 5.0);
  for (Precision precision : precisions_of(pass)) {
    SCOPED_TRACE(testing::Message() << "case " << c.name << ", " << name(pass) << ' ' << name(precision) << ", seed "
                                    << seed);
    const Attention plain = attention_of(c, precision, "reference"), fast = attention_of(c, precision, "cpu");
    Outputs saved, expected, got;
    try {
      if (pass == Pass::backward) saved = run(c, in, plain, Pass::forward);
      expected = run(c, in, plain, pass, &saved);
    } catch (const Error& error) {
      ADD_FAILURE() << "reference refuses: " << error.what();
      continue;
    }
    try {
      got = run(c, in, fast, pass, &saved);
    } catch (const Error& error) {
      ADD_FAILURE() << "cpu refuses: " << error.what();
      continue;
    }
    if (pass == Pass::backward) {
      expect_as_good({"dq", &got.dq, &expected.dq, &want.dq, rms.dq, most.dq});
      expect_as_good({"dk", &got.dk, &expected.dk, &want.dk, rms.dk, most.dk});
      expect_as_good({"dv", &got.dv, &expected.dv, &want.dv, rms.dv, most.dv});
      continue;
    }
    expect_as_good({"o", &got.o, &expected.o, &want.o, rms.o, most.o});
    expect_as_good({"lse", &got.lse, &expected.lse, &want.lse, rms.lse, most.lse});
    if (pass == Pass::jvp) expect_as_good({"to", &got.to, &expected.to, &want.to, rms.to, most.to});
    if (!got.o_residual.present()) continue;
    const Values got_o = sum_of(got.o, got.o_residual), expected_o = sum_of(expected.o, expected.o_residual);
    expect_as_good({"o + o_residual", &got_o, &expected_o, &want.o, rms.o, most.o});
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Passes,
                         testing::Combine(testing::Range<size_t>(0, cases().size()),
                                          testing::Values(Pass::forward, Pass::backward, Pass::jvp)),
                         [](const auto& info) {
                           return std::string(cases()[std::get<0>(info.param)].name) + '_' +
                                  name(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace octet::test
