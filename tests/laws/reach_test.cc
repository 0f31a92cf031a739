// The numbers of one token reach the rows that meet it, and others by no more than the error of the precision: not
// through means and scales that tokens share, nor as 0 inf. Cases: a last key far from all others under a causal mask,
// a row of do far larger than the others.
#include <cmath>
#include <limits>

#include "laws/laws.h"

namespace octet::test {
namespace {

class Reach : public EveryRecipe {};

constexpr Case kCase{.name = "reach", .heads = 2, .kv_heads = 2, .tokens_q = 200, .tokens_k = 200, .causal = true};
constexpr int64_t kLast = kCase.tokens_k - 1;

// v per channel, k per thread group or block: published recipes, in which a key moves others (docs/numerics.md).
bool shares_scales(const Recipe& recipe) {
  return recipe.precision == Precision::int8_fp8 || recipe.precision == Precision::fp8 ||
         recipe.precision == Precision::sagebwd;
}

// The rows before the last of what belongs to queries.
void expect_earlier_rows_as_good(const Outputs& got, const Outputs& clean, const Outputs& want, const Recipe& recipe,
                                 const std::string& what) {
  for (size_t i = 0; i < outputs_of(got, recipe.pass).size(); ++i) {
    const auto [name, values] = outputs_of(got, recipe.pass)[i];
    const std::string output = name;
    if (output == "dk" || output == "dv") continue;
    const auto rows = [&](const Outputs& x) { return slice(*outputs_of(x, recipe.pass)[i].values, 2, 0, kLast); };
    const double error = difference(rows(got), rows(want)).rms, plain = difference(rows(clean), rows(want)).rms;
    EXPECT_LE(error, 1.5 * plain + 1e-7) << what << ": " << name << " of the rows before errs by " << error
                                         << ", without it by " << plain;
  }
}

TEST_P(Reach, of_the_last_key_are_rows_that_see_it) {
  const Recipe recipe = GetParam();
  if (shares_scales(recipe)) return;
  const Inputs in = draw(kCase, 1);
  const Outputs want = exact(kCase, in, recipe.pass);
  for (const char* backend : {"cpu", "reference"}) {
    const Outputs clean = compute(kCase, in, recipe, 0, backend);
    for (const bool of_v : {false, true})
      for (const double x : {30.0, 1e3, 7e4, 1e6, 1e20, 1e30, double(INFINITY), double(NAN)}) {
        Inputs other = in;
        Values& operand = of_v ? other.v : other.k;
        for (int64_t c = 0; c < 64; ++c) operand.at(0, 1, kLast, c) = c % 3 ? x : -x;
        expect_earlier_rows_as_good(
            compute(kCase, other, recipe, 0, backend), clean, want, recipe,
            std::string(backend) + ", last " + (of_v ? "v " : "k ") + std::to_string(x) + ", seed 1");
      }
  }
}

// Half of all keys, from the middle on, or random ones of them that only later queries see.
TEST_P(Reach, of_many_keys_are_rows_that_see_them) {
  const Recipe recipe = GetParam();
  if (shares_scales(recipe)) return;
  for (uint64_t seed = 2; seed < 6; ++seed) {
    const Inputs in = draw(kCase, seed);
    const int64_t first = 40 + static_cast<int64_t>(seed) * 20;
    const Values sizes = normal({1, 1, kCase.tokens_k, 1}, seed, 0.0, 20.0);
    Inputs other = in;
    for (Values* x : {&other.k, &other.v})
      for_each(x->shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
        if (t >= first && sizes.at(0, 0, t, 0) > 0.0)
          x->at(b, h, t, c) *= std::exp2(std::fmin(sizes.at(0, 0, t, 0), 60.0));
      });
    const Outputs got = compute(kCase, other, recipe), clean = compute(kCase, in, recipe),
                  want = exact(kCase, in, recipe.pass);
    for (size_t i = 0; i < outputs_of(got, recipe.pass).size(); ++i) {
      const std::string name = outputs_of(got, recipe.pass)[i].name;
      if (name == "dk" || name == "dv") continue;
      const auto rows = [&](const Outputs& x) { return slice(*outputs_of(x, recipe.pass)[i].values, 2, 0, first); };
      EXPECT_LE(difference(rows(got), rows(want)).rms, 2 * difference(rows(clean), rows(want)).rms + 1e-7)
          << name << " of the rows before key " << first << ", seed " << seed;
    }
  }
}

// Rows that see an infinity in v say so.
TEST_P(Reach, of_infinity_is_not_lost) {
  const Recipe recipe = GetParam();
  if (recipe.precision == Precision::fp8_raw) return;  // e4m3 has no infinity, and a raw cast saturates
  for (const char* backend : {"cpu", "reference"}) {
    Inputs in = draw(kCase, 1);
    in.v.at(0, 1, 100, 7) = INFINITY;
    const Outputs got = compute(kCase, in, recipe, 0, backend);
    for (int64_t t = 0; t < kCase.tokens_q; ++t) {
      EXPECT_EQ(std::isfinite(got.o.at(0, 1, t, 7)), t < 100) << backend << ": o of query " << t;
      if (recipe.pass == Pass::backward) {
        EXPECT_EQ(std::isfinite(got.dq.at(0, 1, t, 0)), t < 100) << backend << ": dq of query " << t;
      }
      if (recipe.pass == Pass::jvp) {
        EXPECT_EQ(std::isfinite(got.to.at(0, 1, t, 7)), t < 100) << backend << ": to of query " << t;
      }
    }
  }
}

// A query that is not finite reaches the keys that it sees: under a causal mask those up to its own.
TEST_P(Reach, of_a_query_are_keys_that_it_sees) {
  const Recipe recipe = GetParam();
  if (recipe.pass != Pass::backward) return;
  constexpr int64_t kQuery = 100;
  for (const char* backend : {"cpu", "reference"})
    for (const double x : {double(INFINITY), double(NAN)}) {
      Inputs in = draw(kCase, 1);
      for (int64_t c = 0; c < 64; ++c) in.q.at(0, 1, kQuery, c) = x;
      const Outputs got = compute(kCase, in, recipe, 0, backend);
      for (int64_t t = kQuery + 1; t < kCase.tokens_k; ++t)
        for (int64_t c = 0; c < 64; ++c) {
          EXPECT_TRUE(std::isfinite(got.dk.at(0, 1, t, c))) << backend << ": dk of key " << t << ", q " << x;
          EXPECT_TRUE(std::isfinite(got.dv.at(0, 1, t, c))) << backend << ": dv of key " << t << ", q " << x;
        }
    }
}

// Gradients that come in may differ by as much: rows of dq do not share their do.
TEST_P(Reach, of_a_row_of_do_is_its_row_of_dq) {
  const Recipe recipe = GetParam();
  if (recipe.pass != Pass::backward || recipe.precision == Precision::fp8 || recipe.precision == Precision::sagebwd)
    return;  // fp8: do per tensor; sagebwd: ds with one scale for 64 x 64
  const Inputs in = draw(kCase, 1);
  const Outputs want = exact(kCase, in, recipe.pass);
  for (const char* backend : {"cpu", "reference"}) {
    const Outputs clean = compute(kCase, in, recipe, 0, backend);
    for (const double factor : {1e3, 1e7, 1e20}) {
      Inputs other = in;
      for (int64_t c = 0; c < 64; ++c) other.do_.at(0, 1, kLast, c) *= factor;
      expect_earlier_rows_as_good(compute(kCase, other, recipe, 0, backend), clean, want, recipe,
                                  std::string(backend) + ", last do times " + std::to_string(factor) + ", seed 1");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Recipes, Reach, testing::ValuesIn(every_recipe()), label);

// Numbers near the ends of float32: scales, and values of one size.
class Sizes : public EveryForward {};

TEST_P(Sizes, of_scale_may_be_the_smallest) {
  Case c = kCase;
  for (const float scale : {0x1p-126f, 3e-38f, 1e-30f}) {
    c.scale = scale;
    const Inputs in = draw(c, 1);
    const Outputs want = exact(c, in, Pass::forward);
    const Recipe recipe{Pass::forward, GetParam()};
    const Outputs got = compute(c, in, recipe);
    const Allowed allowed(c, in, recipe);
    expect_near(got.o, want.o, allowed(&Outputs::o), "o");
    expect_near(got.lse, want.lse, allowed(&Outputs::lse), "lse");
  }
}

TEST_P(Sizes, of_v_are_those_of_o) {
  const Recipe recipe{Pass::forward, GetParam()};
  if (recipe.precision == Precision::fp8_raw || recipe.precision == Precision::f16) return;  // v is cast
  const Inputs in = draw(kCase, 1);
  const double bound = 2 * Allowed(kCase, in, recipe)(&Outputs::o);
  const Outputs want = exact(kCase, in, Pass::forward);
  for (const int exponent : {-110, -107, -80, 60, 100}) {
    Inputs other = in;
    const double factor = std::ldexp(1.0, exponent);
    other.v = combined(factor, in.v, 0, in.v);
    const Values o = compute(kCase, other, recipe).o;
    expect_near(combined(1 / factor, o, 0, o), want.o, bound + kCase.tokens_k * 0x1p-126 / factor,
                "o of v times 2^" + std::to_string(exponent));
  }
}

INSTANTIATE_TEST_SUITE_P(Precisions, Sizes, testing::ValuesIn(precisions_of(Pass::forward)),
                         [](const auto& info) { return std::string(name(info.param)); });

}  // namespace
}  // namespace octet::test
