// Inputs at the edge: huge logits, zeros where a scale is computed, rows that are all equal, tiny gradients. Nothing
// may turn into NaN, and what has a closed form must have it.
#include <algorithm>
#include <array>
#include <cmath>

#include "laws/laws.h"

namespace octet::test {
namespace {

class Extremes : public EveryRecipe {};

constexpr Case kCase{.name = "extremes", .heads = 2, .tokens_q = 100, .tokens_k = 150, .dtype = DType::bf16};

void expect_finite(const Outputs& got, Pass pass, const std::string& what) {
  for (const auto& [tensor, values] : outputs_of(got, pass))
    for_each(values->shape, [&, tensor = tensor, values = values](int64_t b, int64_t h, int64_t t, int64_t c) {
      ASSERT_TRUE(std::isfinite(values->at(b, h, t, c))) << what << ": " << tensor << '[' << b << ", " << h << ", " << t
                                                         << ", " << c << "] = " << values->at(b, h, t, c);
    });
}

TEST_P(Extremes, huge_logits_stay_finite) {
  Inputs in = draw(kCase, 1);
  in.q = rounded(combined(1e3, in.q, 0, in.q), kCase.dtype);
  const Outputs got = compute(kCase, in, GetParam());
  expect_finite(got, GetParam().pass, "q times 1000, seed 1");
  // o is a mean of values: within their range, but for the rounding of v and of o.
  EXPECT_LE(largest(got.o), largest(in.v) * (1 + 0x1p-3));
}

TEST_P(Extremes, zeros_stay_finite) {
  const Inputs in = draw(kCase, 2);
  const auto zeroed = [&](auto&& hit) {
    Inputs out = in;
    for (Values* x : {&out.q, &out.k, &out.v, &out.do_, &out.tk})
      for_each(x->shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
        if (hit(x == &out.q, x == &out.k, x == &out.v, t, c)) x->at(b, h, t, c) = 0.0;
      });
    return out;
  };
  const Recipe recipe = GetParam();
  const auto check = [&](const char* what, const Inputs& x) {
    expect_finite(compute(kCase, x, recipe), recipe.pass, std::string(what) + ", seed 2");
  };
  check("a zero channel of q, k, v", zeroed([](bool, bool, bool, int64_t, int64_t c) { return c == 3; }));
  check("a block of zero keys", zeroed([](bool, bool k, bool, int64_t t, int64_t) { return k && t >= 64 && t < 128; }));
  check("all keys zero", zeroed([](bool, bool k, bool, int64_t, int64_t) { return k; }));
  check("all queries zero", zeroed([](bool q, bool, bool, int64_t, int64_t) { return q; }));
  check("all values zero", zeroed([](bool, bool, bool v, int64_t, int64_t) { return v; }));
  check("everything zero", zeroed([](bool, bool, bool, int64_t, int64_t) { return true; }));
}

// Whatever the size of v, o errs alike in proportion, up to 1e38, where sums of P v lie beyond float32 before they are
// divided by the sum of P, and down to 1e-30. Formats that v is cast to have their own range.
TEST_P(Extremes, values_of_any_one_size_keep_their_precision) {
  const Recipe recipe = GetParam();
  if (recipe.pass != Pass::forward || recipe.precision == Precision::f16 || recipe.precision == Precision::fp8_raw)
    return;
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const bool equal_keys : {false, true}) {
      Case c = kCase;
      c.dtype = c.out_dtype = dtype;
      Inputs in = draw(c, 6);
      if (equal_keys)
        for_each(in.k.shape,
                 [&](int64_t b, int64_t h, int64_t t, int64_t i) { in.k.at(b, h, t, i) = in.k.at(b, h, 0, i); });
      const Values want = exact(c, in, Pass::forward).o;
      const double plain = difference(compute(c, in, recipe).o, want).rms;
      // The largest number becomes 1e38 or half of that.
      const double largest_factor = std::exp2(std::floor(std::log2(1e38 / largest(in.v))));
      for (const double factor : {0x1p-100, 0x1p90, 0x1p113, largest_factor}) {
        Inputs scaled = in;
        scaled.v = combined(factor, in.v, 0, in.v);
        const Values o = compute(c, scaled, recipe).o;
        EXPECT_LE(difference(combined(1 / factor, o, 0, o), want).rms, 1.25 * plain + 1e-6 * largest(in.v))
            << "v times " << factor << (equal_keys ? ", equal keys" : "") << ", seed 6";
      }
    }
}

// Float32 holds logits of 10^8 to whole numbers only, and larger ones to less: lse as it was saved may lie below them
// by much, and P from lse is at most 1 all the same.
TEST_P(Extremes, logits_beyond_the_digits_of_lse_leave_gradients_finite) {
  if (GetParam().pass != Pass::backward) return;
  for (const double size : {1e4, 1e8, 1e15}) {
    if (GetParam().precision == Precision::f16 && size > 1e4) continue;  // q and k are inf in f16
    Inputs in = draw(kCase, 7);
    for (Values* x : {&in.q, &in.k}) *x = rounded(combined(size, *x, 0, *x), kCase.dtype);
    for (const char* backend : {"cpu", "reference"})
      expect_finite(compute(kCase, in, GetParam(), 0, backend), GetParam().pass,
                    std::string(backend) + ", q and k times " + testing::PrintToString(size) + ", seed 7");
  }
}

// Equal keys share their probability: o is the mean of v, lse = s + ln m with s the common logit.
TEST_P(Extremes, equal_keys_average_the_values) {
  Inputs in = draw(kCase, 3);
  for_each(in.k.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) { in.k.at(b, h, t, c) = in.k.at(b, h, 0, c); });
  Values want(kCase.o_shape());
  for_each(want.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
    for (int64_t s = 0; s < kCase.tokens_k; ++s)
      want.at(b, h, t, c) += in.v.at(b, 0, s, c) / static_cast<double>(kCase.tokens_k);
  });
  const Outputs got = compute(kCase, in, GetParam());
  const Recipe forward{Pass::forward, GetParam().precision, GetParam().bias_correction};
  expect_near(got.o, want, Allowed(kCase, in, forward)(&Outputs::o), "o");
  expect_finite(got, GetParam().pass, "equal keys, seed 3");
}

// Real gradients are 1e-6 and smaller: those of the inputs scale with do and dlse, bit for bit where the scale is a
// power of two, also where only one of the two is there.
TEST_P(Extremes, gradients_scale_with_do_and_dlse) {
  if (GetParam().pass != Pass::backward) return;
  Case with_sinks = kCase;
  with_sinks.sinks = Sinks::shared, with_sinks.dlse = true;
  for (const Case& c : {kCase, with_sinks})
    for (const bool zero_do : {false, true}) {
      if (zero_do && !c.dlse) continue;
      Inputs in = draw(c, 4);
      if (zero_do) in.do_ = Values(in.do_.shape);
      const Outputs large = compute(c, in, GetParam());
      for (const double factor : {0x1p-20, 0x1p20}) {
        Inputs scaled = in;
        scaled.do_ = combined(factor, in.do_, 0, in.do_), scaled.dlse = combined(factor, in.dlse, 0, in.dlse);
        const Outputs small = compute(c, scaled, GetParam());
        for (Values Outputs::*gradient : {&Outputs::dq, &Outputs::dk, &Outputs::dv, &Outputs::dsinks})
          expect_same_bits(small.*gradient, combined(factor, large.*gradient, 0, large.*gradient),
                           testing::PrintToString(factor) + " times do and dlse");
      }
    }
}

// ds is as large as dlse, where that is large, and no smaller than what do gives it, where that is tiny: neither leaves
// the range of its format.
TEST_P(Extremes, gradients_of_huge_and_tiny_dlse_are_precise) {
  if (GetParam().pass != Pass::backward) return;
  Case c = kCase;
  c.sinks = Sinks::shared, c.dlse = true;
  const Inputs in = draw(c, 10);
  const auto errors = [&](double of_do, double of_dlse) {
    Inputs x = in;
    x.do_ = combined(of_do, in.do_, 0, in.do_), x.dlse = combined(of_dlse, in.dlse, 0, in.dlse);
    const Outputs got = compute(c, x, GetParam()), want = exact(c, x, Pass::backward);
    return std::array{difference(got.dq, want.dq).relative(), difference(got.dk, want.dk).relative(),
                      difference(got.dsinks, want.dsinks).relative()};
  };
  const auto both = errors(1, 1), only_do = errors(1, 0), only_dlse = errors(0, 1);
  const double tiny = 0x1p-100, huge = 0x1p100;
  const std::pair<double, double> scales[] = {{1, 0x1p20}, {1, huge},    {1, 0x1p-20}, {1, tiny},
                                              {tiny, 1},   {tiny, tiny}, {0, tiny},    {0, huge}};
  for (const auto& [of_do, of_dlse] : scales) {
    const auto got = errors(of_do, of_dlse);
    for (size_t i = 0; i < got.size(); ++i)
      EXPECT_LE(got[i], 1.25 * std::max({both[i], only_do[i], only_dlse[i]}) + 1e-6)
          << "tensor " << i << ", do times " << of_do << ", dlse times " << of_dlse << ", seed 10";
  }
}

INSTANTIATE_TEST_SUITE_P(Recipes, Extremes, testing::ValuesIn(every_recipe()), label);

// Kernels may keep the maximum of earlier keys and let p exceed 1: never so far that its products with v leave
// the range of floats. One key of each 64 has a logit above those of all keys before it, by little or by much; the rest
// count nothing, so that no sum of p exceeds 3.1.
struct Rising {
  Precision precision;
  DType dtype;  // of the inputs
  double v;     // its size
};

class RisingLogits : public testing::TestWithParam<Rising> {};

TEST_P(RisingLogits, leave_huge_values_in_range) {
  const auto [precision, dtype, size] = GetParam();
  const Case c{.name = "rising",
               .tokens_q = 40,
               .tokens_k = 1024,
               .scale = 1.f,
               .dtype = dtype,
               .out_dtype = dtype == DType::f16 ? DType::f32 : dtype};  // 8-bit recipes may err beyond the range of f16
  for (const double rise : {.4, 1.0, 3.4, 8.0}) {
    Inputs in = draw(c, 9);
    in.q = combined(.1, in.q, 0, in.q), in.k = combined(.1, in.k, 0, in.k);
    for (int64_t t = 0; t < c.tokens_q; ++t) in.q.at(0, 0, t, 0) = 4.0;
    for (int64_t t = 0; t < c.tokens_k; ++t) {
      const int64_t tile = t / 64;
      in.k.at(0, 0, t, 0) = (rise * static_cast<double>(tile) - (t % 64 == 5 * tile % 64 ? 0.0 : 20.0)) / 4.0;
      for (int64_t i = 0; i < c.dim_v; ++i)
        in.v.at(0, 0, t, i) = size * std::copysign(1.0 - t % 7 * .125, in.v.at(0, 0, t, i));
    }
    for (Values* x : {&in.q, &in.k, &in.v}) *x = rounded(*x, dtype);
    Outputs out[2];
    for (const char* backend : {"cpu", "reference"}) {
      Attention attention = attention_of(c, precision, backend);
      attention.bias_correction =
          precision == Precision::bf16 ? BiasCorrection::none : attention.bias_correction;  // p is then bf16
      out[*backend == 'r'] = run(c, in, attention, Pass::forward);
    }
    const Outputs want = exact(c, in, Pass::forward);
    SCOPED_TRACE(testing::Message() << "logits rise by " << rise << " each 64 keys, v of " << size << ", seed 9");
    const Noise noise = f32_noise(c, in, 0.0, 5.0);
    expect_near(out[0].o, want.o, 2 * difference(out[1].o, want.o).largest + noise.o, "o");
    // Against an old maximum not even the largest p is exactly 1: l errs by half a unit of bf16.
    const double rounding = precision == Precision::bf16 ? 0x1p-8 : 0.0;
    expect_near(out[0].lse, want.lse, 2 * difference(out[1].lse, want.lse).largest + noise.lse + rounding, "lse");
  }
}

constexpr double kLargestBf16 = 0x1.fep127, kLargestF16 = 65504.0;

std::vector<Rising> rising() {
  std::vector<Rising> list;
  for (const Precision precision : precisions_of(Pass::forward)) {
    if (precision == Precision::f16 || precision == Precision::fp8_raw) continue;  // cast v to a narrower range
    for (const double v : {1.0, 1e21, kLargestBf16 / 4}) list.push_back({precision, DType::bf16, v});
  }
  list.push_back({Precision::f16, DType::f16, kLargestF16 / 4});
  list.push_back({Precision::fp8_raw, DType::bf16, 448.0 / 4});
  return list;
}

INSTANTIATE_TEST_SUITE_P(Recipes, RisingLogits, testing::ValuesIn(rising()), [](const auto& info) {
  const Rising& x = info.param;
  return std::string(name(x.precision)) + (x.v == 1e21 ? "_1e21" : x.v == 1.0 ? "_1" : "_largest");
});

}  // namespace
}  // namespace octet::test
