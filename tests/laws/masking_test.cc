// Masked keys and values have no effect: NaN and infinity in those that no query sees change nothing, in a query they
// stay in its row, and a query that sees no key gives o = 0, lse = -inf and zero derivatives.
#include <cmath>
#include <limits>

#include "laws/laws.h"

namespace octet::test {
namespace {

class Masking : public EveryRecipe {};

constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();

// Fills keys [first, last) of k, v and their tangents.
Inputs with_keys(Inputs in, int64_t first, int64_t last, double poison) {
  for (Values* x : {&in.k, &in.v, &in.tk, &in.tv})
    for_each(x->shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
      if (t >= first && t < last) x->at(b, h, t, c) = poison;
    });
  return in;
}

// Keys [first, tokens_k) are seen by no query of the case: the result must be the one without them, and their
// gradients 0.
void expect_unseen(const Case& c, int64_t first, const Recipe& recipe) {
  const Inputs in = draw(c, 1);
  const Outputs clean = compute(c, with_keys(in, first, c.tokens_k, 0.0), recipe);
  for (double poison : {kNaN, kInfinity, -kInfinity}) {
    const Outputs got = compute(c, with_keys(in, first, c.tokens_k, poison), recipe);
    expect_same_bits(got, clean, recipe.pass, std::string(c.name) + ": keys of " + std::to_string(poison));
    if (recipe.pass != Pass::backward) continue;
    EXPECT_EQ(largest(slice(got.dk, 2, first, c.tokens_k)), 0.0) << "dk of unseen keys";
    EXPECT_EQ(largest(slice(got.dv, 2, first, c.tokens_k)), 0.0) << "dv of unseen keys";
  }
}

TEST_P(Masking, hides_keys_right_of_the_diagonal) {
  expect_unseen({.name = "causal",
                 .heads = 2,
                 .tokens_q = 100,
                 .tokens_k = 170,
                 .causal = true,
                 .alignment = Alignment::top_left},
                100, GetParam());
}

TEST_P(Masking, hides_keys_outside_the_window) {
  expect_unseen({.name = "window",
                 .heads = 2,
                 .tokens_q = 70,
                 .tokens_k = 200,
                 .window = {{10, 5}},
                 .alignment = Alignment::top_left},
                75, GetParam());
}

TEST_P(Masking, hides_keys_of_a_sequence_without_queries) {
  expect_unseen(
      {.name = "packed", .tokens_q = 100, .tokens_k = 150, .cu_seqlens_q = {0, 100, 100}, .cu_seqlens_k = {0, 90, 150}},
      90, GetParam());
}

// The mask of the case, with the keys from `first` on hidden from all queries.
void expect_unseen_by_tensor(Case c, const Recipe& recipe) {
  const int64_t first = 81;
  Inputs in = draw(c, 2);
  const bool added = in.mask_dtype != DType::boolean;
  for_each(in.mask.shape, [&](int64_t b, int64_t h, int64_t t, int64_t s) {
    if (s >= first) in.mask.at(b, h, t, s) = added ? -kInfinity : 0.0;
  });
  const Outputs clean = compute(c, with_keys(in, first, c.tokens_k, 0.0), recipe);
  for (double poison : {kNaN, kInfinity, -kInfinity})
    expect_same_bits(compute(c, with_keys(in, first, c.tokens_k, poison), recipe), clean, recipe.pass,
                     std::string(c.name) + ": keys of " + std::to_string(poison));
}

TEST_P(Masking, hides_keys_behind_a_bool_tensor) {
  expect_unseen_by_tensor({.name = "keys", .tokens_q = 70, .tokens_k = 150, .mask = MaskTensor::keys}, GetParam());
  expect_unseen_by_tensor({.name = "heads", .tokens_q = 70, .tokens_k = 150, .mask = MaskTensor::heads}, GetParam());
}

TEST_P(Masking, hides_keys_behind_minus_infinity) {
  expect_unseen_by_tensor({.name = "bias", .tokens_q = 70, .tokens_k = 150, .mask = MaskTensor::bias_f32}, GetParam());
}

// Under a causal mask, NaN in key j reaches no query before j.
TEST_P(Masking, keeps_the_future_from_the_past) {
  if (GetParam().pass == Pass::backward) return;  // gradients flow from the future to the past
  const Case c{.name = "causal", .heads = 2, .tokens_q = 200, .tokens_k = 200, .causal = true};
  const int64_t first = 130;
  const Inputs in = draw(c, 3);
  const Outputs clean = compute(c, with_keys(in, first, c.tokens_k, 0.0), GetParam());
  const Outputs got = compute(c, with_keys(in, first, c.tokens_k, kNaN), GetParam());
  for (size_t i = 0; i < outputs_of(got, GetParam().pass).size(); ++i) {
    const auto [what, values] = outputs_of(got, GetParam().pass)[i];
    expect_same_bits(slice(*values, 2, 0, first), slice(*outputs_of(clean, GetParam().pass)[i].values, 2, 0, first),
                     what);
    for (int64_t t = first; t < c.tokens_q; ++t)
      EXPECT_TRUE(std::isnan(values->at(0, 0, t, 0)))
          << what << ": query " << t << " sees NaN, but got " << values->at(0, 0, t, 0);
  }
}

// NaN in one row of q spoils that row of o, lse, to and dq, and nothing else but the sums dk and dv: the others are as
// if that row were zero (its part in means and scales that rows share).
TEST_P(Masking, keeps_a_bad_query_in_its_row) {
  const Case c{.name = "row", .heads = 2, .tokens_q = 100, .tokens_k = 90};
  const int64_t bad = 37;
  Inputs in = draw(c, 4);
  for (int64_t i = 0; i < in.q.shape[3]; ++i) in.q.at(0, 0, bad, i) = 0.0;
  const Outputs clean = compute(c, in, GetParam());
  for (double poison : {kNaN, kInfinity}) {
    if (std::isinf(poison) && GetParam().precision == Precision::fp8_raw) continue;  // e4m3 has no infinity: 448
    Inputs other = in;
    other.q.at(0, 0, bad, 5) = poison;
    const Outputs got = compute(c, other, GetParam());
    const auto wanted = outputs_of(clean, GetParam().pass), found = outputs_of(got, GetParam().pass);
    for (size_t i = 0; i < wanted.size(); ++i) {
      const std::string what = wanted[i].name;
      if (what == "dk" || what == "dv") continue;
      const std::string where = what + " with " + std::to_string(poison) + " in query " + std::to_string(bad);
      EXPECT_TRUE(std::isnan(found[i].values->at(0, 0, bad, 0)))
          << where << ": got " << found[i].values->at(0, 0, bad, 0);
      expect_same_bits(slice(*found[i].values, 2, 0, bad), slice(*wanted[i].values, 2, 0, bad),
                       where + ", rows before");
      expect_same_bits(slice(*found[i].values, 2, bad + 1, c.tokens_q),
                       slice(*wanted[i].values, 2, bad + 1, c.tokens_q), where + ", rows after");
      expect_same_bits(slice(*found[i].values, 1, 1, 2), slice(*wanted[i].values, 1, 1, 2), where + ", other head");
    }
  }
}

TEST_P(Masking, of_everything_gives_zeros) {
  const Case blind{.name = "blind", .batch = 2, .heads = 2, .tokens_q = 70, .tokens_k = 90, .mask = MaskTensor::blind};
  const Case tall{.name = "tall",
                  .heads = 2,
                  .tokens_q = 150,
                  .tokens_k = 60,
                  .causal = true,
                  .alignment = Alignment::bottom_right};
  const Case none{.name = "no keys", .heads = 2, .tokens_q = 70, .tokens_k = 0};
  for (const Case* c : {&blind, &tall, &none}) {
    const Outputs got = compute(*c, draw(*c, 5), GetParam());
    for (int64_t t = 0; t < c->tokens_q; ++t) {
      if (!(c == &blind ? t % 7 == 3 : t < c->tokens_q - c->tokens_k)) continue;
      for (const auto& [what, values] : outputs_of(got, GetParam().pass)) {
        const std::string name = what;
        if (name == "dk" || name == "dv") continue;
        for (int64_t i = 0; i < values->shape[3]; ++i)
          EXPECT_EQ(values->at(0, 1, t, i), name == "lse" ? -kInfinity : 0.0)
              << c->name << ": " << what << " of query " << t;
      }
    }
    for (const auto& [what, values] : outputs_of(got, GetParam().pass))
      for (double x : values->data) ASSERT_FALSE(std::isnan(x)) << c->name << ": " << what;
  }
}

INSTANTIATE_TEST_SUITE_P(Recipes, Masking, testing::ValuesIn(every_recipe()), label);

}  // namespace
}  // namespace octet::test
