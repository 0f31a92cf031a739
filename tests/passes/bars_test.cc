// The CPU backend against the acceptance bars of docs/numerics.md: relative L2 and cosine against float64, on inputs
// with the difficulties of trained models. The naive modes must fail where the remedies pass.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "passes/bar_inputs.h"

namespace octet::test {
namespace {

struct Fit {
  double relative_l2, cosine;
};

// Over all heads together, as the tables were measured.
Fit fit(const Values& got, const Values& want) {
  return {difference(got, want).relative(), inner(got, want) / std::sqrt(inner(got, got) * inner(want, want))};
}

void expect_bar(const Values& got, const Values& want, double relative_l2, double cosine, const std::string& what) {
  const Fit f = fit(got, want);
  EXPECT_LE(f.relative_l2, relative_l2) << what << ": relative L2; worst " << text(difference(got, want));
  EXPECT_GE(f.cosine, cosine) << what << ": cosine";
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

struct Bar {
  double relative_l2, cosine;
};

struct ForwardBar {
  const char* row;
  Precision precision;
  DType out;
  std::map<std::string, Bar> inputs;
};

void PrintTo(const ForwardBar& bar, std::ostream* out) { *out << bar.row; }

class Forwards : public testing::TestWithParam<ForwardBar> {};

TEST_P(Forwards, hold_their_bars) {
  for (const auto& [name, bar] : GetParam().inputs) {
    const Known& x = known(name, kForward, Pass::forward);
    const Values o = compute(x.c, x.in, Pass::forward, GetParam().precision, GetParam().out).o;
    expect_bar(o, x.want.o, bar.relative_l2, bar.cosine, name);
    // No outliers on normal inputs. int8_f16 in float64 arithmetic has 13.7: its error is that of the sharpest rows.
    if (name != "D1" || GetParam().precision == Precision::int8_f16) continue;
    const Difference d = difference(o, x.want.o);
    EXPECT_LE(d.largest, 12 * d.rms) << "D1: largest error against its root mean square; " << text(d);
  }
}

std::map<std::string, Bar> all_inputs(const Bar& bar) {
  std::map<std::string, Bar> out;
  for (const char* name : {"D1", "D2", "D3", "D4", "D5", "D6"}) out[name] = bar;
  return out;
}

INSTANTIATE_TEST_SUITE_P(
    Bars, Forwards,
    testing::Values(ForwardBar{"bf16", Precision::bf16, DType::f32, all_inputs({.0018, .999997})},
                    ForwardBar{"bf16_o_bf16", Precision::bf16, DType::bf16, all_inputs({.0026, .999996})},
                    ForwardBar{"int8",
                               Precision::int8,
                               DType::f32,
                               {{"D1", {.0145, .9999}},
                                {"D2", {.0208, .9998}},
                                {"D3", {.0135, .9999}},
                                {"D4", {.0172, .9998}},
                                {"D5", {.0004, .999999}},
                                {"D6", {.033, .9995}}}},
                    // D4: the figure without rotation, for a common direction stays one when it is rotated.
                    ForwardBar{"int8_f16",
                               Precision::int8_f16,
                               DType::f32,
                               {{"D1", {.0106, .9999}},
                                {"D2", {.0167, .9998}},
                                {"D3", {.0076, .9999}},
                                {"D4", {.0128, .9999}},
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
                                {"D2", {.070, .9975}},
                                {"D3", {.050, .998}},
                                {"D4", {.064, .998}},
                                {"D5", {.0019, .99999}},
                                {"D6", {.090, .996}}}},
                    ForwardBar{"fp8_raw", Precision::fp8_raw, DType::f32, {{"D1", {.0600, .998}}}},
                    ForwardBar{"fp8_raw_o_e4m3", Precision::fp8_raw, DType::e4m3, {{"D1", {.0675, .9975}}}},
                    ForwardBar{"sagebwd",
                               Precision::sagebwd,
                               DType::f32,
                               {{"D1", {.0222, .9997}}, {"D2", {.0297, .9996}}, {"D5", {.0008, .999999}}}}),
    [](const auto& info) { return std::string(info.param.row); });

// Backward -----------------------------------------------------------------------------------------------------------

struct BackwardBar {
  const char* row;
  Precision precision;
  Remedy remedy;
  std::map<std::string, std::array<double, 3>> relative_l2;  // dq, dk, dv
  double cosine;
};

void PrintTo(const BackwardBar& bar, std::ostream* out) { *out << bar.row; }

class Backwards : public testing::TestWithParam<BackwardBar> {};

TEST_P(Backwards, hold_their_bars) {
  const BackwardBar& bar = GetParam();
  for (const auto& [name, limit] : bar.relative_l2) {
    const Known& x = known(name, kDerivative, Pass::backward);
    const Outputs got = compute(x.c, x.in, Pass::backward, bar.precision, DType::f32, bar.remedy);
    expect_bar(got.dq, x.want.dq, limit[0], bar.cosine, name + " dq");
    expect_bar(got.dk, x.want.dk, limit[1], bar.cosine, name + " dk");
    expect_bar(got.dv, x.want.dv, limit[2], bar.cosine, name + " dv");
  }
}

using Gradients = std::map<std::string, std::array<double, 3>>;
const std::array<double, 3> k16{.0020, .0020, .0020};

INSTANTIATE_TEST_SUITE_P(
    Bars, Backwards,
    testing::Values(BackwardBar{"bf16_none", Precision::bf16, Remedy::none, Gradients{{"B1", k16}}, .999998},
                    BackwardBar{"bf16_project", Precision::bf16, Remedy::project,
                                Gradients{{"B1", k16}, {"B2", k16}, {"B3", k16}, {"B4", k16}, {"B5", k16}, {"B6", k16}},
                                .999998},
                    BackwardBar{"bf16", Precision::bf16, Remedy::f16_inside,
                                Gradients{{"B1", k16}, {"B2", k16}, {"B3", k16}, {"B4", k16}, {"B5", k16}, {"B6", k16}},
                                .999998},
                    BackwardBar{"int8", Precision::int8, Remedy::f16_inside,
                                Gradients{{"B1", {.020, .020, .018}},
                                          {"B2", {.027, .027, .022}},
                                          {"B3", {.020, .020, .018}},
                                          {"B4", {.020, .020, .015}},
                                          {"B5", {.020, .020, .018}},
                                          {"B6", {.027, .027, .024}}},
                                .9996},
                    BackwardBar{"fp8", Precision::fp8, Remedy::f16_inside,
                                Gradients{{"B1", {.061, .061, .062}},
                                          {"B2", {.098, .098, .098}},
                                          {"B3", {.060, .060, .060}},
                                          {"B4", {.091, .091, .091}},
                                          {"B5", {.056, .056, .060}}},
                                .995},
                    // With its own 8-bit o; the published figure on B4 is that of an o with 16-bit P V.
                    BackwardBar{"sagebwd", Precision::sagebwd, Remedy::f16_inside,
                                Gradients{{"B1", {.052, .052, .0461}},
                                          {"B2", {.052, .060, .0534}},
                                          {"B3", {.055, .0537, .0452}},
                                          {"B5", {.041, .0458, .0564}},
                                          {"B6", {.0474, .0457, .0403}}},
                                .9985}),
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
    expect_bar(compute(x.c, x.in, Pass::jvp, GetParam(), DType::f32).to, x.want.to, limit, .99999, name + " to");
  }
}

INSTANTIATE_TEST_SUITE_P(Bars, Tangents, testing::Values(Precision::bf16, Precision::f16),
                         [](const auto& info) { return std::string(name(info.param)); });

// Bias ---------------------------------------------------------------------------------------------------------------

// |sum of errors| / sum of |errors|: 1 when all rows err the same way, near 0 without bias.
struct Coherence {
  double sum = 0.0, magnitude = 0.0;
  void add(double error) { sum += error, magnitude += std::fabs(error); }
  double kappa() const { return magnitude > 0.0 ? std::fabs(sum) / magnitude : 0.0; }
};

// Coherence of delta = sum dO O over rows and seeds: from o alone, and from o + o_residual; and of what comes of it in
// dq, whose first channel moves by -delta error * scale * (sum_j P_ij k_j minus any constant), of one sign here.
struct Bias {
  Coherence from_o, from_unrounded_o, dq_naive, dq;
};

Bias bias_of(bool smaller_sink) {
  const Case c = tied_case();
  Bias bias;
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

TEST(Bias, of_delta_is_gone_with_the_default_remedy) {
  for (bool smaller_sink : {false, true}) {
    const Bias bias = bias_of(smaller_sink);
    EXPECT_LE(bias.from_unrounded_o.kappa(), .1) << (smaller_sink ? "S8" : "S7");
    if (!smaller_sink) continue;
    EXPECT_LE(std::fabs(bias.dq.sum), .1 * std::fabs(bias.dq_naive.sum)) << "S8, dq: what adds up over rows and steps";
    EXPECT_GE(bias.from_o.kappa(), .5) << "S8 without remedy: the test has no power";
    EXPECT_GE(bias.dq_naive.kappa(), .5) << "S8 without remedy, dq: the test has no power";
  }
}

}  // namespace
}  // namespace octet::test
