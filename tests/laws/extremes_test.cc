// Inputs at the edge: huge logits, zeros where a scale is computed, rows that are all equal, tiny gradients. Nothing
// may turn into NaN, and what has a closed form must have it.
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

// Equal keys share their weight: o is the mean of v, lse = s + ln m with s the common logit.
TEST_P(Extremes, equal_keys_average_the_values) {
  Inputs in = draw(kCase, 3);
  for_each(in.k.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) { in.k.at(b, h, t, c) = in.k.at(b, h, 0, c); });
  Values want(kCase.o_shape());
  for_each(want.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
    for (int64_t s = 0; s < kCase.tokens_k; ++s)
      want.at(b, h, t, c) += in.v.at(b, 0, s, c) / static_cast<double>(kCase.tokens_k);
  });
  const Outputs got = compute(kCase, in, GetParam());
  const Recipe forward{Pass::forward, GetParam().precision};
  expect_near(got.o, want, allowed(kCase, in, forward, &Outputs::o), "o");
  expect_finite(got, GetParam().pass, "equal keys, seed 3");
}

// Real gradients are 1e-6 and smaller: dq, dk, dv scale with do, bit for bit where the scale is a power of two.
TEST_P(Extremes, gradients_scale_with_do) {
  if (GetParam().pass != Pass::backward) return;
  Inputs in = draw(kCase, 4);
  const Outputs large = compute(kCase, in, GetParam());
  const double factor = 0x1p-20;
  in.do_ = combined(factor, in.do_, 0, in.do_);
  const Outputs small = compute(kCase, in, GetParam());
  for (Values Outputs::*gradient : {&Outputs::dq, &Outputs::dk, &Outputs::dv})
    expect_same_bits(small.*gradient, combined(factor, large.*gradient, 0, large.*gradient),
                     "gradient of do times 2^-20");
}

INSTANTIATE_TEST_SUITE_P(Recipes, Extremes, testing::ValuesIn(every_recipe()), label);

}  // namespace
}  // namespace octet::test
