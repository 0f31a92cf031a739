// The accuracy every recipe promises, on the standard inputs, against exact attention: what the arithmetic costs, in
// float64, before any kernel exists. A bar is the best figure known for a recipe plus a tenth. What a recipe is compared
// with must miss its bar where it is known to fail, so that the inputs have the power to tell.
#include <gtest/gtest.h>
#include <octet/formats.hpp>

#include <map>
#include <mutex>

#include "cpu/parallel.h"
#include "cpu/reference/attention.h"
#include "support/inputs.h"
#include "support/metrics.h"

namespace octet::reference {
namespace {

using test::Bias;
using test::Distance;
using test::HeadInput;
using test::Standard;
using test::Tangent;

constexpr uint64_t kSeed = 1;
constexpr Standard kD1 = Standard::d1, kD2 = Standard::d2, kD3 = Standard::d3, kD4 = Standard::d4, kD5 = Standard::d5, kD6 = Standard::d6;
constexpr Standard kB1 = kD1, kB2 = kD2, kB3 = Standard::b3, kB4 = kD4, kB5 = Standard::b5, kB6 = Standard::b6;

Matrix matrix(int64_t rows, int64_t cols, const std::vector<double>& data) {
  Matrix x(rows, cols);
  x.data = data;
  return x;
}

Head head_of(const HeadInput& x) {
  Head head{.q = matrix(x.tokens, x.dim, x.q), .k = matrix(x.tokens, x.dim, x.k), .v = matrix(x.tokens, x.dim, x.v),
            .scale = 1.0 / std::sqrt(static_cast<double>(x.dim))};
  head.keys.assign(static_cast<std::size_t>(x.tokens), {0, x.tokens});
  return head;
}

Matrix rounded(Matrix x, octet_dtype format) {
  for (double& value : x.data) value = round_to(format, value);
  return x;
}

Matrix sum(Matrix x, const Matrix& y, double factor = 1.0) {
  for (std::size_t i = 0; i < x.data.size(); ++i) x.data[i] += factor * y.data[i];
  return x;
}

// o as a forward pass leaves it in `format`, with the residual if the recipe's backward pass wants it.
Matrix saved(const Output& out, const Recipe& recipe, octet_dtype format) {
  const Matrix high = rounded(out.o, format);
  return recipe.backward.exact_o ? sum(high, rounded(sum(out.o, high, -1.0), format)) : high;
}

// ---------------------------------------------------------------------------------------------
// Forward: 2048 tokens, dim 128, no mask.

struct Bar {
  Standard input;
  double rel_l2, cos;
};

const Matrix& exact_forward(Standard input, const Head& head) {
  static std::mutex mutex;
  static std::map<Standard, Matrix> known;
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known.find(input); found != known.end()) return found->second;
  }
  Matrix o = forward(head, Recipe{}).o;
  const std::lock_guard lock(mutex);
  return known.emplace(input, std::move(o)).first->second;
}

Distance forward_distance(const Recipe& recipe, Standard input, octet_dtype o_format) {
  const Head head = head_of(test::standard_input(input, 2048, 128, kSeed));
  return test::distance(rounded(forward(head, recipe).o, o_format).data, exact_forward(input, head).data);
}

std::vector<Distance> forward_distances(const Recipe& recipe, const std::vector<Bar>& bars, octet_dtype o_format = OCTET_F32) {
  std::vector<Distance> found(bars.size());
  const auto tasks = static_cast<int64_t>(bars.size());
  cpu::parallel_for(cpu::thread_count(0, tasks), tasks, [&](int64_t i, unsigned) {
    found[static_cast<std::size_t>(i)] = forward_distance(recipe, bars[static_cast<std::size_t>(i)].input, o_format);
  });
  return found;
}

void expect_forward(const Recipe& recipe, const std::vector<Bar>& bars, octet_dtype o_format = OCTET_F32) {
  const std::vector<Distance> found = forward_distances(recipe, bars, o_format);
  for (std::size_t i = 0; i < bars.size(); ++i) {
    SCOPED_TRACE("D" + std::to_string(static_cast<int>(bars[i].input) + 1));
    std::printf("  D%d rel_l2 %.5f (bar %.4f) cos %.6f\n", static_cast<int>(bars[i].input) + 1, found[i].rel_l2, bars[i].rel_l2, found[i].cos);
    EXPECT_LE(found[i].rel_l2, bars[i].rel_l2);
    EXPECT_GE(found[i].cos, bars[i].cos);
    if (bars[i].input == kD1) EXPECT_LE(found[i].max, 12.0 * found[i].rms);
  }
}

void expect_forward_misses(const Recipe& recipe, const std::vector<Bar>& bars) {
  const std::vector<Distance> found = forward_distances(recipe, bars);
  for (std::size_t i = 0; i < bars.size(); ++i) EXPECT_GT(found[i].rel_l2, bars[i].rel_l2);
}

TEST(Bars, bf16_forward_f32_output) {
  constexpr double kCos = .999997;
  expect_forward(flash_attention(OCTET_BF16), {{kD1, .0018, kCos}, {kD2, .0018, kCos}, {kD3, .0018, kCos}, {kD4, .0018, kCos}, {kD5, .0018, kCos}, {kD6, .0018, kCos}});
}

TEST(Bars, bf16_forward_bf16_output) {
  constexpr double kCos = .999996;
  const std::vector<Bar> bars = {{kD1, .0026, kCos}, {kD2, .0026, kCos}, {kD3, .0026, kCos}, {kD4, .0026, kCos}, {kD5, .0026, kCos}, {kD6, .0026, kCos}};
  expect_forward(flash_attention(OCTET_BF16), bars, OCTET_BF16);
  expect_forward(f16_inside(OCTET_BF16), bars, OCTET_BF16);
}

TEST(Bars, int8_forward_sage1_compat) {
  expect_forward(sage1(), {{kD1, .0149, .9999}, {kD2, .0238, .9997}, {kD3, .0495, .9989}, {kD4, .0133, .9999}, {kD6, .126, .993}});
}

TEST(Bars, sage2_8b_compat) {
  expect_forward(sage2(), {{kD1, .0426, .9991}, {kD2, .0407, .9992}, {kD3, .0394, .9992}, {kD4, .0345, .9994}, {kD5, .0024, .99999}, {kD6, .122, .9933}});
}

TEST(Bars, octet_int8) {
  const std::vector<Bar> bars = {{kD1, .0145, .9999}, {kD2, .0208, .9998}, {kD3, .0135, .9999}, {kD4, .0172, .9998}, {kD5, .0004, .99999}, {kD6, .033, .9995}};
  expect_forward(octet_int8(true, false), bars);
  expect_forward(octet_int8(true, true), bars);
  expect_forward_misses(octet_int8(false, false), {{kD3, .0135, 0}, {kD6, .033, 0}});
  expect_forward_misses(sage1(), {{kD2, .0208, 0}, {kD3, .0135, 0}, {kD6, .033, 0}});
}

TEST(Bars, octet_int8_f16) {
  expect_forward(octet_int8_f16(true, true), {{kD1, .0106, .99994}, {kD2, .0097, .99995}, {kD3, .0075, .99995}, {kD4, .0080, .99995}, {kD5, .0003, .99995}, {kD6, .0315, .9995}});
}

TEST(Bars, octet_int8_fp8) {
  expect_forward(octet_int8_fp8(true, false), {{kD1, .0426, .9991}, {kD2, .0407, .9992}, {kD3, .0394, .9992}, {kD4, .0345, .9994}, {kD5, .0024, .99999}, {kD6, .122, .9933}});
}

TEST(Bars, sagebwd_forward_compat) {
  expect_forward(sagebwd(), {{kD1, .0222, .9997}, {kD2, .0297, .9996}, {kD5, .0008, .99999}});
}

TEST(Bars, fp8_helion_compat) {
  expect_forward(helion_fp8(), {{kD1, .0600, .998}});
  expect_forward(helion_fp8(), {{kD1, .0675, .9975}}, OCTET_E4M3);
  expect_forward_misses(helion_fp8(), {{kD2, .070, 0}});
}

TEST(Bars, fp8_octet) {
  expect_forward(octet_fp8(), {{kD1, .058, .998}, {kD2, .070, .9977}, {kD3, .050, .998}, {kD4, .064, .998}, {kD5, .0019, .99999}, {kD6, .090, .996}});
}

TEST(Bars, fp8_flash_attention_3_compat) { expect_forward(flash_attention_3_fp8(), {{kD3, .046, .999}}); }

TEST(Bars, nvfp4_sage3_emulation) { expect_forward(sage3(), {{kD1, .215, .977}, {kD2, .183, .977}, {kD3, .184, .977}}); }

TEST(Bars, int4_sage2_emulation) { expect_forward(sage2_int4(), {{kD1, .237, .974}, {kD2, .21, .974}}); }

// ---------------------------------------------------------------------------------------------
// Backward: 1024 tokens, dim 64, no mask.

struct BackwardBar {
  Standard input;
  double dq, dk, dv;  // relative L2
  double cos;
};

struct BackwardDistance {
  Distance dq, dk, dv;
};

struct ExactBackward {
  Head head;
  Matrix do_;
  Gradients gradients;
};

ExactBackward exact_backward(Standard input) {
  const HeadInput x = test::standard_input(input, 1024, 64, kSeed);
  Head head = head_of(x);
  const Matrix do_ = matrix(x.tokens, x.dim, x.do_);
  const Output out = forward(head, Recipe{});
  Gradients g = backward(head, out.o, out.lse, do_, Recipe{});
  return {std::move(head), do_, std::move(g)};
}

Gradients trained(const Recipe& recipe, octet_dtype o_format, const ExactBackward& exact) {
  const Output out = forward(exact.head, recipe);
  return backward(exact.head, saved(out, recipe, o_format), out.lse, exact.do_, recipe);
}

std::vector<BackwardDistance> backward_distances(const Recipe& recipe, const std::vector<BackwardBar>& bars, octet_dtype o_format) {
  std::vector<BackwardDistance> found(bars.size());
  const auto tasks = static_cast<int64_t>(bars.size());
  cpu::parallel_for(cpu::thread_count(0, tasks), tasks, [&](int64_t i, unsigned) {
    const ExactBackward exact = exact_backward(bars[static_cast<std::size_t>(i)].input);
    const Gradients g = trained(recipe, o_format, exact);
    found[static_cast<std::size_t>(i)] = {test::distance(g.dq.data, exact.gradients.dq.data), test::distance(g.dk.data, exact.gradients.dk.data),
                                          test::distance(g.dv.data, exact.gradients.dv.data)};
  });
  return found;
}

void expect_backward(const Recipe& recipe, const std::vector<BackwardBar>& bars, octet_dtype o_format = OCTET_BF16) {
  const std::vector<BackwardDistance> found = backward_distances(recipe, bars, o_format);
  for (std::size_t i = 0; i < bars.size(); ++i) {
    SCOPED_TRACE("bar " + std::to_string(i));
    const auto& [dq, dk, dv] = found[i];
    std::printf("  %zu: dq %.4f (%.4f) dk %.4f (%.4f) dv %.4f (%.4f) cos %.6f\n", i, dq.rel_l2, bars[i].dq, dk.rel_l2, bars[i].dk, dv.rel_l2, bars[i].dv, dq.cos);
    EXPECT_LE(dq.rel_l2, bars[i].dq);
    EXPECT_LE(dk.rel_l2, bars[i].dk);
    EXPECT_LE(dv.rel_l2, bars[i].dv);
    EXPECT_GE(std::min(dq.cos, std::min(dk.cos, dv.cos)), bars[i].cos);
  }
}

// Bars that a recipe's dq must miss.
void expect_dq_misses(const Recipe& recipe, const std::vector<BackwardBar>& bars, octet_dtype o_format = OCTET_BF16) {
  const std::vector<BackwardDistance> found = backward_distances(recipe, bars, o_format);
  for (std::size_t i = 0; i < bars.size(); ++i) EXPECT_GT(found[i].dq.rel_l2, bars[i].dq);
}

constexpr double kAny = 1e9;  // the row sets no bar

std::vector<BackwardBar> same_bars(double bar, double cos) {
  std::vector<BackwardBar> bars;
  for (Standard input : test::kBackwardInputs) bars.push_back({input, bar, bar, bar, cos});
  return bars;
}

TEST(Bars, bf16_backward_without_remedy) {
  expect_backward(flash_attention(OCTET_BF16), {{kB1, .0020, .0020, .0020, .999998}});
  expect_dq_misses(flash_attention(OCTET_BF16), {{kB2, .0020, kAny, kAny, 0}, {kB3, .0020, kAny, kAny, 0}, {kB4, .0020, kAny, kAny, 0}});
}

TEST(Bars, bf16_backward_project) {
  Recipe recipe = flash_attention(OCTET_BF16);
  recipe.backward.project = OCTET_BF16;
  expect_backward(recipe, same_bars(.0020, .999998));
}

// Every gradient, stored in bf16, within 1.3 times what storing the exact gradient in bf16 costs.
TEST(Bars, bf16_backward_f16_inside) {
  cpu::parallel_for(2, 6, [](int64_t i, unsigned) {
    const ExactBackward exact = exact_backward(test::kBackwardInputs[i]);
    const Gradients g = trained(f16_inside(OCTET_BF16), OCTET_BF16, exact);
    const auto expect_near = [i](const Matrix& got, const Matrix& want, const char* name) {
      const double cost = test::distance(rounded(want, OCTET_BF16).data, want.data).rel_l2;
      const double found = test::distance(rounded(got, OCTET_BF16).data, want.data).rel_l2;
      std::printf("  B%d %s %.5f, rounding alone %.5f\n", static_cast<int>(i) + 1, name, found, cost);
      EXPECT_LE(found, 1.3 * cost) << "B" << i + 1 << ' ' << name;
    };
    expect_near(g.dq, exact.gradients.dq, "dq");
    expect_near(g.dk, exact.gradients.dk, "dk");
    expect_near(g.dv, exact.gradients.dv, "dv");
  });
}

TEST(Bars, sagebwd_backward_compat) {
  Recipe recipe = sagebwd();
  recipe.p = {OCTET_F16};  // the bars are those of a forward pass with f16 p and v
  recipe.v = {OCTET_F16};
  const std::vector<BackwardBar> bars = {{kB1, .052, kAny, kAny, .9987}, {kB2, .052, kAny, kAny, .9983}, {kB3, .055, kAny, kAny, .9987},
                                         {kB4, .032, kAny, kAny, .9987}, {kB5, .041, kAny, kAny, .9985}, {kB6, .046, kAny, kAny, .9987}};
  expect_backward(recipe, bars, OCTET_F16);
  expect_dq_misses(sagebwd(), {bars[3]}, OCTET_F16);  // delta from an output of int8 p and v
}

TEST(Bars, octet_int8_backward) {
  const std::vector<BackwardBar> bars = {{kB1, .020, .020, .018, .9997}, {kB2, .027, .027, .022, .9997}, {kB3, .020, .020, .018, .9997},
                                         {kB4, .020, .020, .015, .9997}, {kB5, .020, .020, .018, .9997}, {kB6, .027, .027, .024, .9997}};
  expect_backward(octet_int8(true, false), bars);
  expect_dq_misses(sagebwd(), bars, OCTET_F16);
}

TEST(Bars, fp8_backward) {
  const auto bar = [](Standard input, double rel_l2) { return BackwardBar{input, rel_l2, rel_l2, rel_l2, .9958}; };
  expect_backward(octet_fp8(), {bar(kB1, .061), bar(kB2, .098), bar(kB3, .060), bar(kB4, .091), bar(kB5, .056)});
  Recipe plain = octet_fp8();
  plain.backward.logits.smooth_k = 0;
  expect_dq_misses(plain, {bar(kB2, .098), bar(kB3, .060)});
}

// ---------------------------------------------------------------------------------------------
// Jvp: 1024 tokens, dim 64, no mask, f32 output.

double jvp_distance(Tangent input, octet_dtype format) {
  const HeadInput x = test::tangent_input(input, 1024, 64, format, kSeed);
  const Head head = head_of(x);
  const Tangents tangents{matrix(x.tokens, x.dim, x.tq), matrix(x.tokens, x.dim, x.tk), matrix(x.tokens, x.dim, x.tv)};
  return test::distance(jvp(head, tangents, flash_attention(format)).to.data, jvp(head, tangents, Recipe{}).to.data).rel_l2;
}

void expect_jvp(octet_dtype format, double bar, double sharp_bar) {
  cpu::parallel_for(2, 6, [&](int64_t i, unsigned) {
    const Tangent input = test::kTangentInputs[i];
    const double found = jvp_distance(input, format);
    std::printf("  %d: to %.5f\n", static_cast<int>(i), found);
    EXPECT_LE(found, input == Tangent::sharp ? sharp_bar : bar) << "input " << i;
  });
}

TEST(Bars, jvp_bf16) { expect_jvp(OCTET_BF16, .0021, .0022); }
TEST(Bars, jvp_f16) { expect_jvp(OCTET_F16, .00027, .00027); }

// ---------------------------------------------------------------------------------------------
// Bias: the error of delta = sum do o over rows built so that rounding o to bf16 always errs the same way.

struct BiasOf {
  Bias delta, outward;  // outward: of o, in units of its last bf16 place
};

// `exact_o`: delta reads bf16 o plus its bf16 residual; else o as the recipe rounds it.
BiasOf bias_of(const Recipe& recipe, bool small_ties, bool exact_o) {
  BiasOf bias;
  for (const test::TiedRow& row : test::tied_rows(small_ties)) {
    Head head{.q = Matrix(1, 8), .k = Matrix(test::kTiedKeys, 8), .v = matrix(test::kTiedKeys, test::kTiedDim, row.v), .keys = {{0, test::kTiedKeys}}};
    head.q[0][0] = 1.0;
    for (int64_t j = 0; j < test::kTiedKeys; ++j) head.k[j][0] = row.logits[static_cast<std::size_t>(j)];
    const Output want = forward(head, Recipe{}), got = forward(head, recipe);
    const Matrix high = rounded(got.o, OCTET_BF16);
    const Matrix o = exact_o ? sum(high, rounded(sum(got.o, high, -1.0), OCTET_BF16)) : high;
    double error = 0.0;
    for (int64_t c = 0; c < test::kTiedDim; ++c) {
      const double e = o[0][c] - want.o[0][c];
      error += row.do_[static_cast<std::size_t>(c)] * e;
      bias.outward.add(std::copysign(e, e * want.o[0][c]) / std::ldexp(1.0, std::ilogb(want.o[0][c]) - 7));
    }
    bias.delta.add(error);
  }
  return bias;
}

constexpr bool kS7 = false, kS8 = true;

double kappa(const char* row, const Recipe& recipe, bool small_ties, bool exact_o = false) {
  const BiasOf bias = bias_of(recipe, small_ties, exact_o);
  std::printf("  %-44s outward %+.4f ulp, t %+6.1f, kappa %.3f\n", row, bias.outward.mean(), bias.outward.t(), bias.delta.kappa());
  return bias.delta.kappa();
}

Recipe bf16_weights(bool sum_rounded, double beta) {
  Recipe r = flash_attention(OCTET_BF16);
  r.sum_rounded_p = sum_rounded;
  r.beta = beta;
  return r;
}

// The failing setup of arXiv 2510.04212: p v rounded to bf16 before it is divided by l.
Recipe early_rounding(int64_t tile, bool sum_rounded, double beta) {
  Recipe r = bf16_weights(sum_rounded, beta);
  r.tile = tile;
  r.acc = OCTET_BF16;
  return r;
}

TEST(Bias, s7_rounding_before_division_is_biased) { EXPECT_GE(kappa("S7 o~ in bf16, then / l", early_rounding(kAllTokens, false, 0), kS7), .5); }

TEST(Bias, s7_rounding_tile_by_tile_is_biased) {
  EXPECT_GE(kappa("S7 o~ in bf16 after each 512 keys", early_rounding(512, false, 0), kS7), .5);
  EXPECT_LE(kappa("S7 .. beta 2", early_rounding(512, false, 2), kS7), .1);
  EXPECT_LE(kappa("S7 .. beta 7", early_rounding(512, false, 7), kS7), .1);
}

TEST(Bias, s7_beta_cures_rounding_before_division) {
  EXPECT_LE(kappa("S7 o~ in bf16, beta 2", early_rounding(kAllTokens, false, 2), kS7), .1);
  EXPECT_LE(kappa("S7 .. l from rounded p", early_rounding(kAllTokens, true, 2), kS7), .1);
}

TEST(Bias, s7_flash_attention_is_unbiased) { EXPECT_LE(kappa("S7 flash attention", bf16_weights(true, 0), kS7), .1); }

TEST(Bias, s8_flash_attention_is_biased) { EXPECT_GE(kappa("S8 flash attention", bf16_weights(true, 0), kS8), .5); }

TEST(Bias, s8_beta_cures_with_l_from_unrounded_p) { EXPECT_LE(kappa("S8 beta 2", bf16_weights(false, 2), kS8), .1); }

TEST(Bias, s8_beta_fails_with_l_from_rounded_p) { EXPECT_GE(kappa("S8 beta 2, l from rounded p", bf16_weights(true, 2), kS8), .5); }

TEST(Bias, exact_delta_is_unbiased) {
  for (bool input : {kS7, kS8}) {
    const BiasOf bias = bias_of(flash_attention(OCTET_BF16), input, true);
    EXPECT_LE(bias.delta.kappa(), .1);
    EXPECT_LE(std::fabs(bias.delta.t()), 4.0);
  }
}

TEST(Bias, f16_inside_is_unbiased) {
  for (bool input : {kS7, kS8}) {
    const BiasOf bias = bias_of(f16_inside(OCTET_BF16), input, true);
    EXPECT_LE(bias.delta.kappa(), .1);
    EXPECT_LE(std::fabs(bias.delta.t()), 4.0);
  }
}

}  // namespace
}  // namespace octet::reference
