// The CPU backend against the acceptance bars of docs/numerics.md: relative L2 and cosine against float64, on inputs
// with the difficulties of trained models. The naive modes must fail where the remedies pass.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "passes/bar_inputs.h"
#include "support/metrics.h"

namespace octet::test {
namespace {

struct Fit {
  double relative_l2, cosine;
};

// What a bar is held to: the worst head, or, where heads of one input differ by as much as recipes do (a direction or a
// few rows decide), all of them together, as the best figures were measured.
enum class Over { worst_head, all_heads };

Fit fit(const Values& got, const Values& want, Over over = Over::worst_head) {
  const auto whole = [](const Values& g, const Values& w) {
    return Fit{difference(g, w).relative(), inner(g, w) / std::sqrt(inner(g, g) * inner(w, w))};
  };
  if (over == Over::all_heads) return whole(got, want);
  Fit worst{0.0, 1.0};
  for (int64_t h = 0; h < want.shape[1]; ++h) {
    const Fit head = whole(slice(got, 1, h, h + 1), slice(want, 1, h, h + 1));
    worst = {std::max(worst.relative_l2, head.relative_l2), std::min(worst.cosine, head.cosine)};
  }
  return worst;
}

struct Bar {
  double relative_l2, cosine;
  Over over = Over::worst_head;
};

void expect_bar(const Values& got, const Values& want, const Bar& bar, const std::string& what) {
  const Fit f = fit(got, want, bar.over);
  EXPECT_LE(f.relative_l2, bar.relative_l2) << what << ": relative L2; worst " << text(difference(got, want));
  // An error of that size at right angles to the answer leaves no larger cosine, whatever a row asks for all inputs.
  EXPECT_GE(f.cosine, std::min(bar.cosine, 1.0 / std::hypot(1.0, bar.relative_l2))) << what << ": cosine";
}

// Inputs and their float64 answers, computed once for all precisions.
struct Known {
  Case c;
  Inputs in;
  Outputs want;
};

const Known& known(const std::string& name, const Case& c, Pass pass) {
  static std::map<std::string, Known> all;
  const auto [at, fresh] = all.try_emplace(name);
  if (fresh) {
    const Inputs in = bar_inputs(name, c);
    at->second = {c, in, exact(c, in, pass)};
  }
  return at->second;
}

constexpr Case kForward{.name = "forward",
                        .heads = 2,
                        .kv_heads = 2,
                        .tokens_q = 2048,
                        .tokens_k = 2048,
                        .dim = 128,
                        .dim_v = 128,
                        .dtype = DType::bf16};
constexpr Case kDerivative{
    .name = "derivative", .heads = 2, .kv_heads = 2, .tokens_q = 1024, .tokens_k = 1024, .dtype = DType::bf16};

Outputs compute(Case c, const Inputs& in, Pass pass, Precision precision, DType out,
                Remedy remedy = Remedy::f16_inside) {
  c.out_dtype = out;
  Attention attention = attention_of(c, precision, "cpu");
  attention.remedy = remedy;
  if (pass != Pass::backward) return run(c, in, attention, pass);
  const Outputs saved = run(c, in, attention, Pass::forward);
  return run(c, in, attention, Pass::backward, &saved);
}

// Forward ------------------------------------------------------------------------------------------------------------

struct ForwardBar {
  const char* row;
  Precision precision;
  DType out;
  std::map<std::string, Bar> inputs;
};

void PrintTo(const ForwardBar& bar, std::ostream* out) { *out << bar.row; }

class Forwards : public testing::TestWithParam<ForwardBar> {};

TEST_P(Forwards, hold_their_bars) {
  const ForwardBar& row = GetParam();
  for (const auto& [name, bar] : row.inputs) {
    const Known& x = known(name, kForward, Pass::forward);
    const Values o = compute(x.c, x.in, Pass::forward, row.precision, row.out).o;
    expect_bar(o, x.want.o, bar, name);
    // No outliers on normal inputs. int8_f16 without smooth_q has 13.7 in float64 arithmetic: of the sharpest rows.
    if (name != "D1" || row.precision == Precision::int8_f16) continue;
    const Difference d = difference(o, x.want.o);
    EXPECT_LE(d.largest, 12 * d.rms) << "D1: largest error against its root mean square; " << text(d);
  }
}

std::map<std::string, Bar> all_inputs(const Bar& bar) {
  std::map<std::string, Bar> out;
  for (const char* name : {"D1", "D2", "D3", "D4", "D5", "D6"}) out[name] = bar;
  return out;
}

constexpr Over kAllHeads = Over::all_heads;

INSTANTIATE_TEST_SUITE_P(
    Bars, Forwards,
    testing::Values(ForwardBar{"bf16", Precision::bf16, DType::f32, all_inputs({.0018, .999997})},
                    ForwardBar{"bf16_o_bf16", Precision::bf16, DType::bf16, all_inputs({.0026, .999997})},
                    ForwardBar{"int8",
                               Precision::int8,
                               DType::f32,
                               {{"D1", {.0145, .9999}},
                                {"D2", {.0208, .9998}},
                                {"D3", {.0135, .9999}},
                                {"D4", {.0172, .9998, kAllHeads}},
                                {"D5", {.0004, .999999}},
                                {"D6", {.033, .9995}}}},
                    // Without smooth_q, which the kernels lack (with it: recipe_bars_test): figures in float64
                    // arithmetic, and a tenth. D4: without rotation, for a common direction stays one when rotated.
                    ForwardBar{"int8_f16",
                               Precision::int8_f16,
                               DType::f32,
                               {{"D1", {.0106, .9999}},
                                {"D2", {.0167, .9998}},
                                {"D3", {.0076, .9999}},
                                {"D4", {.0128, .9999, kAllHeads}},
                                {"D5", {.0003, .999999}},
                                {"D6", {.0315, .9995}}}},
                    ForwardBar{"int8_fp8",
                               Precision::int8_fp8,
                               DType::f32,
                               {{"D1", {.0426, .9991}},
                                {"D2", {.0407, .9992}},
                                {"D3", {.0394, .9992}},
                                {"D4", {.0345, .9994}},
                                {"D5", {.0024, .99999}},
                                {"D6", {.122, .9933}}}},
                    ForwardBar{"fp8",
                               Precision::fp8,
                               DType::f32,
                               {{"D1", {.058, .998}},
                                {"D2", {.070, .998}},
                                {"D3", {.050, .998}},
                                {"D4", {.064, .998, kAllHeads}},
                                {"D5", {.0019, .99999, kAllHeads}},
                                {"D6", {.090, .998}}}},
                    ForwardBar{"fp8_raw", Precision::fp8_raw, DType::f32, {{"D1", {.0600, .998}}}},
                    ForwardBar{"fp8_raw_o_e4m3", Precision::fp8_raw, DType::e4m3, {{"D1", {.0675, .9975}}}},
                    ForwardBar{"sagebwd",
                               Precision::sagebwd,
                               DType::f32,
                               {{"D1", {.0222, .9997}}, {"D2", {.0297, .9996}}, {"D5", {.0008, .999999}}}}),
    [](const auto& info) { return std::string(info.param.row); });

// Backward -----------------------------------------------------------------------------------------------------------

struct Limits {
  double dq, dk, dv;
  Over over = Over::worst_head;
};

struct BackwardBar {
  const char* row;
  Precision precision;
  Remedy remedy;
  std::map<std::string, Limits> inputs;  // relative L2
  double cosine;
};

void PrintTo(const BackwardBar& bar, std::ostream* out) { *out << bar.row; }

class Backwards : public testing::TestWithParam<BackwardBar> {};

TEST_P(Backwards, hold_their_bars) {
  const BackwardBar& bar = GetParam();
  for (const auto& [name, limit] : bar.inputs) {
    const Known& x = known(name, kDerivative, Pass::backward);
    const Outputs got = compute(x.c, x.in, Pass::backward, bar.precision, DType::f32, bar.remedy);
    expect_bar(got.dq, x.want.dq, {limit.dq, bar.cosine, limit.over}, name + " dq");
    expect_bar(got.dk, x.want.dk, {limit.dk, bar.cosine, limit.over}, name + " dk");
    expect_bar(got.dv, x.want.dv, {limit.dv, bar.cosine, limit.over}, name + " dv");
  }
}

std::map<std::string, Limits> every_input(double limit) {
  std::map<std::string, Limits> out;
  for (const char* name : {"B1", "B2", "B3", "B4", "B5", "B6"}) out[name] = {limit, limit, limit};
  return out;
}

INSTANTIATE_TEST_SUITE_P(
    Bars, Backwards,
    testing::Values(BackwardBar{"bf16_none", Precision::bf16, Remedy::none, {{"B1", {.0020, .0020, .0020}}}, .999998},
                    BackwardBar{"bf16_project", Precision::bf16, Remedy::project, every_input(.0020), .999998},
                    BackwardBar{"bf16", Precision::bf16, Remedy::f16_inside, every_input(.0020), .999998},
                    BackwardBar{"int8",
                                Precision::int8,
                                Remedy::f16_inside,
                                {{"B1", {.020, .020, .018}},
                                 {"B2", {.027, .027, .022}},
                                 {"B3", {.020, .020, .018}},
                                 {"B4", {.020, .020, .015}},
                                 {"B5", {.020, .020, .018}},
                                 {"B6", {.027, .027, .024}}},
                                .9997},
                    BackwardBar{"fp8",
                                Precision::fp8,
                                Remedy::f16_inside,
                                {{"B1", {.061, .061, .061}},
                                 {"B2", {.098, .098, .098}},
                                 {"B3", {.060, .060, .060}},
                                 {"B4", {.091, .091, .091}},
                                 {"B5", {.056, .056, .056, kAllHeads}}},
                                .9958},
                    // With its own 8-bit o; the published figure on B4 is that of an o with 16-bit P V. The bars are of
                    // dq; dk and dv: their figures in float64 arithmetic, and a tenth.
                    BackwardBar{"sagebwd",
                                Precision::sagebwd,
                                Remedy::f16_inside,
                                {{"B1", {.052, .052, .0461}},
                                 {"B2", {.052, .060, .0534, kAllHeads}},
                                 {"B3", {.055, .0537, .0452}},
                                 {"B5", {.041, .0458, .0564, kAllHeads}},
                                 {"B6", {.0474, .0457, .0403}}},
                                .9987}),
    [](const auto& info) { return std::string(info.param.row); });

// Without a remedy the rounding of dS meets the common offset of the keys.
TEST(Backwards, without_remedy_fail_on_a_common_offset) {
  const Known& x = known("B3", kDerivative, Pass::backward);
  EXPECT_GE(
      fit(compute(x.c, x.in, Pass::backward, Precision::bf16, DType::f32, Remedy::none).dq, x.want.dq).relative_l2, .1);
}

// Every gradient within 1.3 times the rounding of its own output format, with o saved in that format and its residual.
TEST(Backwards, of_f16_inside_err_little_more_than_their_outputs_round) {
  for (const std::string name : {"B1", "B2", "B3", "B4", "B5", "B6"}) {
    const Known& x = known(name, kDerivative, Pass::backward);
    const Outputs got = compute(x.c, x.in, Pass::backward, Precision::bf16, DType::bf16);
    for (Values Outputs::*gradient : {&Outputs::dq, &Outputs::dk, &Outputs::dv}) {
      const Values& want = x.want.*gradient;
      EXPECT_LE(fit(got.*gradient, want).relative_l2, 1.3 * fit(rounded(want, DType::bf16), want).relative_l2)
          << name
          << (gradient == &Outputs::dq   ? " dq"
              : gradient == &Outputs::dk ? " dk"
                                         : " dv");
    }
  }
}

// Jvp ----------------------------------------------------------------------------------------------------------------

class Tangents : public testing::TestWithParam<Precision> {};

TEST_P(Tangents, hold_their_bars) {
  const bool f16 = GetParam() == Precision::f16;
  for (const std::string name : {"J1", "J2", "J3", "J4", "J5", "J6"}) {
    const Known& x = known(name, kDerivative, Pass::jvp);
    const double limit = f16 ? .00027 : name == "J6" ? .0022 : .0021;
    expect_bar(compute(x.c, x.in, Pass::jvp, GetParam(), DType::f32).to, x.want.to, {limit, .99999}, name + " to");
  }
}

INSTANTIATE_TEST_SUITE_P(Bars, Tangents, testing::Values(Precision::bf16, Precision::f16),
                         [](const auto& info) { return std::string(name(info.param)); });

// Bias ---------------------------------------------------------------------------------------------------------------

// Errors of delta = sum do o over rows and seeds, from o alone and from o + o_residual; and what they do to dq, whose
// first channel moves by -(error of delta) * scale * (sum_j P_ij k_j minus any constant), of one sign here.
struct Biases {
  Bias from_o, from_unrounded_o, dq_naive, dq;
};

Biases biases_of(bool smaller_sink) {
  const Case c = tied_case();
  Biases bias;
  for (const Inputs& in : tied_inputs(smaller_sink)) {
    const Outputs want = exact(c, in, Pass::backward), forward_want = exact(c, in, Pass::forward);
    const Outputs saved = run(c, in, attention_of(c, Precision::bf16, "cpu"), Pass::forward);
    const Outputs naive = compute(c, in, Pass::backward, Precision::bf16, DType::bf16, Remedy::none);
    const Outputs remedied = compute(c, in, Pass::backward, Precision::bf16, DType::bf16);
    for (int64_t h = 0; h < c.heads; ++h) {
      double from_o = 0.0, from_unrounded = 0.0;
      for (int64_t i = 0; i < c.dim_v; ++i) {
        const double weight = in.do_.at(0, h, 0, i), o = saved.o.at(0, h, 0, i), truth = forward_want.o.at(0, h, 0, i);
        from_o += weight * (o - truth);
        from_unrounded += weight * (o + saved.o_residual.at(0, h, 0, i) - truth);
      }
      bias.from_o.add(from_o), bias.from_unrounded_o.add(from_unrounded);
      bias.dq_naive.add(naive.dq.at(0, h, 0, 0) - want.dq.at(0, h, 0, 0));
      bias.dq.add(remedied.dq.at(0, h, 0, 0) - want.dq.at(0, h, 0, 0));
    }
  }
  return bias;
}

// The bar is that of delta: kappa <= .1 and |t| <= 4.
void expect_unbiased_delta(const Biases& bias) {
  EXPECT_LE(bias.from_unrounded_o.kappa(), .1);
  EXPECT_LE(std::fabs(bias.from_unrounded_o.t()), 4.0);
}

// On S7 rounding o once is unbiased as it is: nothing to cure, and nothing to spoil.
TEST(DeltaBias, s7_default_remedy) { expect_unbiased_delta(biases_of(false)); }

TEST(DeltaBias, s8_default_remedy) {
  const Biases bias = biases_of(true);
  expect_unbiased_delta(bias);
  EXPECT_GE(bias.from_o.kappa(), .5) << "without remedy: the test has no power";
  EXPECT_GE(bias.dq_naive.kappa(), .5) << "dq without remedy: the test has no power";
  // Of dq no bar is known: its own rounding, in no proportion to that of delta, may lean to one side. What adds up over
  // rows is at most a tenth of the errors that the remedy is for.
  EXPECT_LE(std::fabs(bias.dq.mean()), .1 * std::fabs(bias.dq_naive.mean()));
}

// Remedy beta as it comes, through the kernels: delta from o alone.
TEST(DeltaBias, s7_s8_remedy_beta) {
  for (const bool smaller_sink : {false, true}) {
    const Case c = tied_case();
    Bias delta;
    for (const Inputs& in : tied_inputs(smaller_sink)) {
      Attention attention = attention_of(c, Precision::bf16, "cpu");
      attention.remedy = Remedy::beta;
      const Values got = run(c, in, attention, Pass::forward).o, want = exact(c, in, Pass::forward).o;
      for (int64_t h = 0; h < c.heads; ++h) {
        double error = 0.0;
        for (int64_t i = 0; i < c.dim_v; ++i)
          error += in.do_.at(0, h, 0, i) * (got.at(0, h, 0, i) - want.at(0, h, 0, i));
        delta.add(error);
      }
    }
    EXPECT_LE(delta.kappa(), .1) << (smaller_sink ? "S8" : "S7");
    EXPECT_LE(std::fabs(delta.t()), 4.0) << (smaller_sink ? "S8" : "S7");
  }
}

}  // namespace
}  // namespace octet::test
