// The accuracy every recipe promises, on the standard inputs, against exact attention: what the arithmetic costs, in
// float64, before any kernel exists. A bar is the best figure known for a recipe plus a tenth. What a recipe is
// compared with must miss its bar where it is known to fail, so that the inputs have the power to tell.
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <octet/formats.hpp>

#include "cpu/parallel.h"
#include "cpu/reference/attention.h"
#include "support/inputs.h"
#include "support/metrics.h"

namespace octet::reference {
namespace {

using test::Distance;
using test::HeadInput;
using test::Standard;
using test::Tangent;

constexpr int64_t kHeads = 2;
constexpr Standard kD1 = Standard::d1, kD2 = Standard::d2, kD3 = Standard::d3, kD4 = Standard::d4, kD5 = Standard::d5,
                   kD6 = Standard::d6;
constexpr Standard kB1 = kD1, kB2 = kD2, kB3 = Standard::b3, kB4 = kD4, kB5 = Standard::b5, kB6 = Standard::b6;

Matrix matrix(int64_t rows, int64_t cols, const std::vector<double>& data) {
  Matrix x(rows, cols);
  x.data = data;
  return x;
}

Head head_of(const HeadInput& x) {
  Head head{.q = matrix(x.tokens, x.dim, x.q),
            .k = matrix(x.tokens, x.dim, x.k),
            .v = matrix(x.tokens, x.dim, x.v),
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

// The errors that a bar bounds: those of each head, or, where heads of one input differ by as much as recipes do (a
// direction or a few rows decide), of all of them together, as the best figures were measured.
enum class Over { each_head, all_heads };

struct Bar {
  Standard input;
  double rel_l2, cos;
  Over over = Over::each_head;
};

// An error of `rel_l2` at right angles to the answer leaves no larger cosine, whatever a row asks for all its inputs.
double cos_bar(double cos, double rel_l2) { return std::min(cos, 1.0 / std::sqrt(1.0 + rel_l2 * rel_l2)); }

// Answers of several heads, to be compared head by head or at once.
struct Pairs {
  std::vector<std::vector<double>> got, want;

  void add(const Matrix& g, const Matrix& w) { got.push_back(g.data), want.push_back(w.data); }
  std::vector<Distance> distances(Over over) const {
    std::vector<Distance> list;
    if (over == Over::each_head) {
      for (std::size_t h = 0; h < got.size(); ++h) list.push_back(test::distance(got[h], want[h]));
      return list;
    }
    std::vector<double> all_got, all_want;
    for (std::size_t h = 0; h < got.size(); ++h) {
      all_got.insert(all_got.end(), got[h].begin(), got[h].end());
      all_want.insert(all_want.end(), want[h].begin(), want[h].end());
    }
    return {test::distance(all_got, all_want)};
  }
};

double largest_rel_l2(const std::vector<Distance>& distances) {
  double largest = 0.0;
  for (const Distance& d : distances) largest = std::max(largest, d.rel_l2);
  return largest;
}

// The exact answers to each head of the inputs, computed when first asked for: all recipes share them.
template <class Answer>
class Known {
 public:
  template <class Compute>
  const Answer& get(Standard input, int64_t number, const Compute& compute) {
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = all_.find({input, number}); found != all_.end()) return found->second;
    }
    Answer answer = compute();
    const std::lock_guard lock(mutex_);
    return all_.emplace(std::pair{input, number}, std::move(answer)).first->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<Standard, int64_t>, Answer> all_;
};

const Matrix& exact_forward(Standard input, int64_t number, const Head& head) {
  static Known<Matrix> known;
  return known.get(input, number, [&] { return forward(head, Recipe{}).o; });
}

std::vector<Distance> forward_distances(const Recipe& recipe, const Bar& bar, octet_dtype o_format) {
  Pairs heads;
  for (int64_t number = 0; number < kHeads; ++number) {
    const Head head = head_of(test::standard_input(bar.input, 2048, 128, number, false));
    heads.add(rounded(forward(head, recipe).o, o_format), exact_forward(bar.input, number, head));
  }
  return heads.distances(bar.over);
}

std::vector<std::vector<Distance>> forward_distances(const Recipe& recipe, const std::vector<Bar>& bars,
                                                     octet_dtype o_format = OCTET_F32) {
  std::vector<std::vector<Distance>> found(bars.size());
  const auto tasks = static_cast<int64_t>(bars.size());
  cpu::parallel_for(cpu::thread_count(0, tasks), tasks, [&](int64_t i, unsigned) {
    found[static_cast<std::size_t>(i)] = forward_distances(recipe, bars[static_cast<std::size_t>(i)], o_format);
  });
  return found;
}

void expect_forward(const Recipe& recipe, const std::vector<Bar>& bars, octet_dtype o_format = OCTET_F32) {
  const auto found = forward_distances(recipe, bars, o_format);
  for (std::size_t i = 0; i < bars.size(); ++i)
    for (const Distance& d : found[i]) {
      const int number = static_cast<int>(bars[i].input) + 1;
      SCOPED_TRACE(testing::Message() << 'D' << number);
      std::printf("  D%d rel_l2 %.5f (bar %.4f) cos %.6f max / rms %.1f\n", number, d.rel_l2, bars[i].rel_l2, d.cos,
                  d.max / d.rms);
      EXPECT_LE(d.rel_l2, bars[i].rel_l2);
      EXPECT_GE(d.cos, cos_bar(bars[i].cos, bars[i].rel_l2));
      if (bars[i].input == kD1) {
        EXPECT_LE(d.max, 12.0 * d.rms);
      }
    }
}

void expect_forward_misses(const Recipe& recipe, const std::vector<Bar>& bars) {
  const auto found = forward_distances(recipe, bars);
  for (std::size_t i = 0; i < bars.size(); ++i) EXPECT_GT(largest_rel_l2(found[i]), bars[i].rel_l2);
}

TEST(Bars, bf16_forward_f32_output) {
  constexpr double kCos = .999997;
  expect_forward(flash_attention(OCTET_BF16), {{kD1, .0018, kCos},
                                               {kD2, .0018, kCos},
                                               {kD3, .0018, kCos},
                                               {kD4, .0018, kCos},
                                               {kD5, .0018, kCos},
                                               {kD6, .0018, kCos}});
}

TEST(Bars, bf16_forward_bf16_output) {
  constexpr double kCos = .999997;
  const std::vector<Bar> bars = {{kD1, .0026, kCos}, {kD2, .0026, kCos}, {kD3, .0026, kCos},
                                 {kD4, .0026, kCos}, {kD5, .0026, kCos}, {kD6, .0026, kCos}};
  expect_forward(flash_attention(OCTET_BF16), bars, OCTET_BF16);
  expect_forward(f16_compute(OCTET_BF16), bars, OCTET_BF16);
}

TEST(Bars, int8_forward_sage1_compat) {
  expect_forward(
      sage1(), {{kD1, .0149, .9999}, {kD2, .0238, .9997}, {kD3, .0495, .9989}, {kD4, .0133, .9999}, {kD6, .126, .993}});
}

TEST(Bars, sage2_8b_compat) {
  expect_forward(sage2(), {{kD1, .0426, .9991},
                           {kD2, .0407, .9992},
                           {kD3, .0394, .9992},
                           {kD4, .0345, .9994},
                           {kD5, .0024, .99999},
                           {kD6, .122, .9933}});
}

TEST(Bars, octet_int8) {
  const std::vector<Bar> bars = {{kD1, .0145, .9999},  {kD2, .0208, .9998},
                                 {kD3, .0135, .9999},  {kD4, .0172, .9998, Over::all_heads},
                                 {kD5, .0004, .99999}, {kD6, .033, .9995}};
  expect_forward(octet_int8(true, false), bars);
  expect_forward(octet_int8(true, true), bars);
  expect_forward_misses(octet_int8(false, false), {{kD3, .0135, 0}, {kD6, .033, 0}});
  expect_forward_misses(sage1(), {{kD2, .0208, 0}, {kD3, .0135, 0}, {kD6, .033, 0}});
}

TEST(Bars, octet_int8_f16) {
  expect_forward(octet_int8_f16(true, true), {{kD1, .0106, .99995},
                                              {kD2, .0097, .99995},
                                              {kD3, .0075, .99995},
                                              {kD4, .0080, .99995},
                                              {kD5, .0003, .99995},
                                              {kD6, .0315, .9995}});
}

TEST(Bars, octet_int8_fp8) {
  expect_forward(octet_int8_fp8(true, false), {{kD1, .0426, .9991},
                                               {kD2, .0407, .9992},
                                               {kD3, .0394, .9992},
                                               {kD4, .0345, .9994},
                                               {kD5, .0024, .99999},
                                               {kD6, .122, .9933}});
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
  expect_forward(octet_fp8(), {{kD1, .058, .998},
                               {kD2, .070, .998},
                               {kD3, .050, .998},
                               {kD4, .064, .998, Over::all_heads},
                               {kD5, .0019, .998, Over::all_heads},
                               {kD6, .090, .998}});
}

TEST(Bars, fp8_flash_attention_3_compat) { expect_forward(flash_attention_3_fp8(), {{kD3, .046, .999}}); }

TEST(Bars, nvfp4_sage3_emulation) {
  expect_forward(sage3(), {{kD1, .215, .977}, {kD2, .183, .977}, {kD3, .184, .977}});
}

TEST(Bars, int4_sage2_emulation) { expect_forward(sage2_int4(), {{kD1, .237, .974}, {kD2, .21, .974}}); }

// ---------------------------------------------------------------------------------------------
// Backward: 1024 tokens, dim 64, no mask.

constexpr double kAny = 1e9;  // the row sets no bar

struct BackwardBar {
  Standard input;
  double dq, dk, dv;  // relative L2
  double cos;         // of those with a bar
  Over over = Over::each_head;
};

struct ExactBackward {
  Head head;
  Matrix do_;
  Gradients gradients;
};

const ExactBackward& exact_backward(Standard input, int64_t number) {
  static Known<ExactBackward> known;
  return known.get(input, number, [&] {
    const HeadInput x = test::standard_input(input, 1024, 64, number, true);
    Head head = head_of(x);
    const Matrix do_ = matrix(x.tokens, x.dim, x.do_);
    const Output out = forward(head, Recipe{});
    Gradients g = backward(head, out.o, out.lse, do_, Recipe{});
    return ExactBackward{std::move(head), do_, std::move(g)};
  });
}

Gradients trained(const Recipe& recipe, octet_dtype o_format, const ExactBackward& exact) {
  const Output out = forward(exact.head, recipe);
  return backward(exact.head, saved(out, recipe, o_format), out.lse, exact.do_, recipe);
}

using GradientDistances = std::array<std::vector<Distance>, 3>;  // of dq, dk, dv

GradientDistances backward_distances(const Recipe& recipe, const BackwardBar& bar, octet_dtype o_format) {
  Pairs dq, dk, dv;
  for (int64_t number = 0; number < kHeads; ++number) {
    const ExactBackward& exact = exact_backward(bar.input, number);
    const Gradients got = trained(recipe, o_format, exact), &want = exact.gradients;
    dq.add(got.dq, want.dq), dk.add(got.dk, want.dk), dv.add(got.dv, want.dv);
  }
  return {dq.distances(bar.over), dk.distances(bar.over), dv.distances(bar.over)};
}

std::vector<GradientDistances> backward_distances(const Recipe& recipe, const std::vector<BackwardBar>& bars,
                                                  octet_dtype o_format) {
  std::vector<GradientDistances> found(bars.size());
  const auto tasks = static_cast<int64_t>(bars.size());
  cpu::parallel_for(cpu::thread_count(0, tasks), tasks, [&](int64_t i, unsigned) {
    found[static_cast<std::size_t>(i)] = backward_distances(recipe, bars[static_cast<std::size_t>(i)], o_format);
  });
  return found;
}

void expect_backward(const Recipe& recipe, const std::vector<BackwardBar>& bars, octet_dtype o_format = OCTET_BF16) {
  const std::vector<GradientDistances> found = backward_distances(recipe, bars, o_format);
  for (std::size_t i = 0; i < bars.size(); ++i) {
    const auto expect = [&](const char* gradient, const std::vector<Distance>& distances, double bar) {
      SCOPED_TRACE(testing::Message() << 'B' << i + 1 << ' ' << gradient);
      for (const Distance& d : distances) {
        std::printf("  B%zu %s %.4f (%.4f) cos %.6f\n", i + 1, gradient, d.rel_l2, bar == kAny ? 0.0 : bar, d.cos);
        if (bar == kAny) continue;
        EXPECT_LE(d.rel_l2, bar);
        EXPECT_GE(d.cos, cos_bar(bars[i].cos, bar));
      }
    };
    expect("dq", found[i][0], bars[i].dq), expect("dk", found[i][1], bars[i].dk), expect("dv", found[i][2], bars[i].dv);
  }
}

// Bars that a recipe's dq must miss.
void expect_dq_misses(const Recipe& recipe, const std::vector<BackwardBar>& bars, octet_dtype o_format = OCTET_BF16) {
  const std::vector<GradientDistances> found = backward_distances(recipe, bars, o_format);
  for (std::size_t i = 0; i < bars.size(); ++i) EXPECT_GT(largest_rel_l2(found[i][0]), bars[i].dq);
}

std::vector<BackwardBar> same_bars(double bar, double cos) {
  std::vector<BackwardBar> bars;
  for (Standard input : test::kBackwardInputs) bars.push_back({input, bar, bar, bar, cos});
  return bars;
}

TEST(Bars, bf16_backward_without_bias_correction) {
  expect_backward(flash_attention(OCTET_BF16), {{kB1, .0020, .0020, .0020, .999998}});
  expect_dq_misses(flash_attention(OCTET_BF16),
                   {{kB2, .0020, kAny, kAny, 0}, {kB3, .0020, kAny, kAny, 0}, {kB4, .0020, kAny, kAny, 0}});
}

TEST(Bars, bf16_backward_gproj) {
  Recipe recipe = flash_attention(OCTET_BF16);
  recipe.backward.gproj = OCTET_BF16;
  expect_backward(recipe, same_bars(.0020, .999998));
}

// Every gradient, stored in bf16, within 1.3 times what storing the exact gradient in bf16 costs.
TEST(Bars, bf16_backward_f16_compute) {
  cpu::parallel_for(2, 6, [](int64_t i, unsigned) {
    const ExactBackward& exact = exact_backward(test::kBackwardInputs[i], 0);
    const Gradients g = trained(f16_compute(OCTET_BF16), OCTET_BF16, exact);
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
  const auto bar = [](Standard input, double dq, Over over = Over::each_head) {
    return BackwardBar{input, dq, kAny, kAny, .9987, over};
  };
  const std::vector<BackwardBar> bars = {bar(kB1, .052), bar(kB2, .052, Over::all_heads), bar(kB3, .055),
                                         bar(kB4, .032), bar(kB5, .041, Over::all_heads), bar(kB6, .046)};
  expect_backward(recipe, bars, OCTET_F16);
  expect_dq_misses(sagebwd(), {bars[3]}, OCTET_F16);  // delta from an output of int8 p and v
}

TEST(Bars, octet_int8_backward) {
  const std::vector<BackwardBar> bars = {{kB1, .0134, .0134, .0105, .9997}, {kB2, .0191, .0215, .0184, .9997},
                                         {kB3, .0136, .0136, .0095, .9997}, {kB4, .0156, .0145, .0098, .9997},
                                         {kB5, .0131, .0138, .0095, .9997}, {kB6, .0261, .0264, .0219, .9996}};
  expect_backward(octet_int8(true, false), bars);
  expect_dq_misses(sagebwd(), bars, OCTET_F16);
  Recipe recipe = octet_int8(true, false);  // one mean of all keys for the sink and the others
  recipe.backward.logits.smooth_k = kAllTokens;
  expect_dq_misses(recipe, {bars[3]});
  recipe = octet_int8(true, false);  // delta from an output of uint8 p
  recipe.backward.delta = OCTET_DELTA_FROM_O, recipe.backward.exact_o = true;
  expect_dq_misses(recipe, {bars[3]});
}

TEST(Bars, fp8_backward) {
  const auto bar = [](Standard input, double rel_l2, Over over = Over::each_head) {
    return BackwardBar{input, rel_l2, rel_l2, rel_l2, .9958, over};
  };
  expect_backward(octet_fp8(),
                  {bar(kB1, .061), bar(kB2, .098), bar(kB3, .060), bar(kB4, .091), bar(kB5, .056, Over::all_heads)});
  Recipe plain = octet_fp8();
  plain.backward.logits.smooth_k = 0;
  expect_dq_misses(plain, {bar(kB2, .098), bar(kB3, .060)});
}

// ---------------------------------------------------------------------------------------------
// Jvp: 1024 tokens, dim 64, no mask, f32 output.

double jvp_distance(Tangent input, octet_dtype format) {
  const HeadInput x = test::tangent_input(input, 1024, 64, format);
  const Head head = head_of(x);
  const Tangents tangents{matrix(x.tokens, x.dim, x.tq), matrix(x.tokens, x.dim, x.tk), matrix(x.tokens, x.dim, x.tv)};
  return test::distance(jvp(head, tangents, flash_attention(format)).to.data, jvp(head, tangents, Recipe{}).to.data)
      .rel_l2;
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

}  // namespace
}  // namespace octet::reference
