// Equalities that softmax(scale q k^T) v obeys whatever the numbers are: shift of the logits, permutation of the keys,
// constant values, and the merge of two halves of the keys by their lse.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "laws/laws.h"

namespace octet::test {
namespace {

class Invariance : public EveryForward {};

constexpr Case kCase{.name = "invariance", .heads = 2, .kv_heads = 2, .tokens_q = 100, .tokens_k = 150};

double bound_of(const Inputs& a, const Inputs& b, Precision precision, Values Outputs::*output) {
  const Recipe recipe{Pass::forward, precision};
  return Allowed(kCase, a, recipe)(output) + Allowed(kCase, b, recipe)(output);
}

// k + 1 u^T adds scale q.u to every logit of a row: o stays, lse moves by that.
TEST_P(Invariance, of_o_to_a_shift_of_the_logits) {
  const Inputs in = draw(kCase, 1);
  const Values u = normal({1, 1, 1, kCase.dim}, 2);
  Inputs shifted = in;
  for_each(in.k.shape,
           [&](int64_t b, int64_t h, int64_t t, int64_t c) { shifted.k.at(b, h, t, c) += u.at(0, 0, 0, c); });
  shifted.k = rounded(shifted.k, DType::f32);
  const Outputs before = forward(kCase, in, GetParam()), after = forward(kCase, shifted, GetParam());
  expect_near(after.o, before.o, bound_of(in, shifted, GetParam(), &Outputs::o), "o");
  Values lse = before.lse;
  for_each(in.q.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
    lse.at(b, h, t, 0) += kCase.effective_scale() * in.q.at(b, h, t, c) * u.at(0, 0, 0, c);
  });
  expect_near(after.lse, lse, bound_of(in, shifted, GetParam(), &Outputs::lse), "lse");
}

TEST_P(Invariance, to_a_permutation_of_the_keys) {
  const Inputs in = draw(kCase, 3);
  std::vector<int64_t> order(static_cast<size_t>(kCase.tokens_k));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(4));
  Inputs permuted = in;
  for_each(in.k.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
    permuted.k.at(b, h, t, c) = in.k.at(b, h, order[static_cast<size_t>(t)], c);
    permuted.v.at(b, h, t, c) = in.v.at(b, h, order[static_cast<size_t>(t)], c);
  });
  const Outputs before = forward(kCase, in, GetParam()), after = forward(kCase, permuted, GetParam());
  expect_near(after.o, before.o, bound_of(in, permuted, GetParam(), &Outputs::o), "o");
  expect_near(after.lse, before.lse, bound_of(in, permuted, GetParam(), &Outputs::lse), "lse");
}

// Rows of P sum to 1. A channel of v that is constant in powers of two is exact in every format.
TEST_P(Invariance, of_a_constant_v) {
  Inputs in = draw(kCase, 5);
  Values want(kCase.o_shape());
  const auto channel = [](int64_t c) { return std::ldexp(c % 2 ? -1.0 : 1.0, static_cast<int>(c % 3)); };
  for_each(in.v.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) { in.v.at(b, h, t, c) = channel(c); });
  for_each(want.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) { want.at(b, h, t, c) = channel(c); });
  expect_near(forward(kCase, in, GetParam()).o, want, Allowed(kCase, in, {Pass::forward, GetParam()})(&Outputs::o),
              "o");
}

// o = (e^(lse1 - lse) o1 + e^(lse2 - lse) o2), lse = log(e^lse1 + e^lse2).
TEST_P(Invariance, of_the_whole_to_merging_two_halves) {
  const Inputs in = draw(kCase, 6);
  const Outputs whole = forward(kCase, in, GetParam());
  Outputs half[2];
  const Allowed of_whole(kCase, in, {Pass::forward, GetParam()});
  double o_bound = of_whole(&Outputs::o), lse_bound = of_whole(&Outputs::lse);
  const int64_t cut[3] = {0, 90, kCase.tokens_k};
  for (int i = 0; i < 2; ++i) {
    Case c = kCase;
    c.tokens_k = cut[i + 1] - cut[i];
    Inputs part = in;
    part.k = slice(in.k, 2, cut[i], cut[i + 1]), part.v = slice(in.v, 2, cut[i], cut[i + 1]);
    half[i] = forward(c, part, GetParam());
    // The shares of the halves sum to 1 and move by at most the error of an lse, times the spread of the values.
    const Allowed of_part(c, part, {Pass::forward, GetParam()});
    const double lse_error = of_part(&Outputs::lse);
    o_bound += of_part(&Outputs::o) + lse_error * largest(in.v);
    lse_bound += lse_error;
  }
  Values o(whole.o.shape), lse(whole.lse.shape);
  for_each(o.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
    const double l0 = half[0].lse.at(b, h, t, 0), l1 = half[1].lse.at(b, h, t, 0);
    const double l = lse.at(b, h, t, 0) = std::max(l0, l1) + std::log1p(std::exp(-std::fabs(l0 - l1)));
    o.at(b, h, t, c) = std::exp(l0 - l) * half[0].o.at(b, h, t, c) + std::exp(l1 - l) * half[1].o.at(b, h, t, c);
  });
  expect_near(whole.o, o, o_bound, "o");
  expect_near(whole.lse, lse, lse_bound, "lse");
}

INSTANTIATE_TEST_SUITE_P(Precisions, Invariance, testing::ValuesIn(precisions_of(Pass::forward)),
                         [](const auto& info) { return std::string(name(info.param)); });

}  // namespace
}  // namespace octet::test
