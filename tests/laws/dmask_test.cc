// The gradient of a mask tensor told by other calls: by differences of the forward pass, by the same mask without
// broadcasts, and by what the rows and columns of ds sum to.
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <utility>

#include "laws/laws.h"
#include "support/broadcast_masks.h"

namespace octet::test {
namespace {

// The sums of a gradient of every logit over the dimensions that a mask broadcasts.
Values summed(const Values& x, const Shape& shape) {
  Values sums(shape);
  for_each(x.shape, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    const auto at = [&](size_t dimension, int64_t index) { return shape[dimension] == 1 ? 0 : index; };
    sums.at(at(0, b), at(1, h), at(2, i), at(3, j)) += x.at(b, h, i, j);
  });
  return sums;
}

Values expanded(const Values& x, const Shape& shape) {
  Values whole(shape);
  for_each(shape, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    const auto at = [&](size_t dimension, int64_t index) { return x.shape[dimension] == 1 ? 0 : index; };
    whole.at(b, h, i, j) = x.at(at(0, b), at(1, h), at(2, i), at(3, j));
  });
  return whole;
}

// Two blocks of queries and two tiles of keys, of which the last are not whole.
const Case kPlain{.name = "plain",
                  .batch = 2,
                  .heads = 4,
                  .kv_heads = 2,
                  .tokens_q = 70,
                  .tokens_k = 90,
                  .dim = 32,
                  .dim_v = 40,
                  .dmask = true};
const Case kTerms{.name = "terms",
                  .batch = 2,
                  .heads = 4,
                  .kv_heads = 2,
                  .tokens_q = 100,
                  .tokens_k = 90,
                  .dim = 32,
                  .dim_v = 32,
                  .window = {{50, 10}},
                  .alignment = Alignment::bottom_right,
                  .sinks = Sinks::shared,
                  .dlse = true,
                  .softcap = 2,
                  .alibi = Alibi::each,
                  .dropout_p = .2,
                  .dmask = true};

const Case kCases[] = {kPlain, kTerms};

// (L(mask + h t) - L(mask - h t)) / 2h = <dmask, t> + O(h^2) for L = <o, do> + <lse, dlse>, all in float64: a step of
// 2^-16 leaves a remainder of some 2^-32 and a rounding of some 2^-37, the last factor 2^-26 bounds both.
TEST(OneMaskGradient, of_the_oracle_follows_differences_of_the_forward_pass) {
  for (const Case& c : kCases)
    for (int broadcast = 0; broadcast < kBroadcasts; ++broadcast) {
      Inputs in = with_mask(c, 1, broadcast);
      in.mask_dtype = DType::f64;
      const Values direction = normal(in.mask.shape, 77);
      const auto loss = [&](double h) {
        Inputs moved = in;
        moved.mask = combined(1, in.mask, h, direction);
        const Outputs out = exact(c, moved, Pass::forward);
        double sum = inner(out.o, in.do_);
        for (size_t z = 0; z < in.dlse.data.size(); ++z)
          if (std::isfinite(out.lse.data[z])) sum += out.lse.data[z] * in.dlse.data[z];
        return sum;
      };
      const double h = 0x1p-16, quotient = (loss(h) - loss(-h)) / (2 * h);
      const Values dmask = exact(c, in, Pass::backward).dmask;
      double magnitude = 0;
      for (size_t z = 0; z < dmask.data.size(); ++z) magnitude += std::fabs(dmask.data[z] * direction.data[z]);
      EXPECT_NEAR(inner(dmask, direction), quotient, 0x1p-26 * (1 + magnitude))
          << c.name << ", broadcast " << broadcast;
    }
}

class MaskGradient : public EveryRecipe {};

// What the kernels of all recipes are compared with, computed once for a case and a broadcast.
struct Expected {
  Inputs in;
  Values dmask;
  double noise;
};

const Expected& expected(size_t index, int broadcast) {
  static std::map<std::pair<size_t, int>, Expected> all;
  const auto found = all.find({index, broadcast});
  if (found != all.end()) return found->second;
  const Case& c = kCases[index];
  const Inputs in = with_mask(c, 2, broadcast);
  const double noise = f32_noise(c, in, largest_column_sum(c, in), 5).dmask;
  return all[{index, broadcast}] = {in, exact(c, in, Pass::backward).dmask, noise};
}

// The kernels against float64 with every broadcast; 16 and 8 bits with one of each way of summing.
TEST_P(MaskGradient, is_a_sum_over_what_the_mask_broadcasts) {
  for (size_t index = 0; index < std::size(kCases); ++index)
    for (int broadcast = 0; broadcast < kBroadcasts; ++broadcast) {
      const Case& c = kCases[index];
      const bool every = GetParam().precision == Precision::f32;
      if (!every && broadcast != 0b0001 && broadcast != 0b0110 && broadcast != 0b1011) continue;
      const Expected& want = expected(index, broadcast);
      const std::string what = std::string(c.name) + ", broadcast " + std::to_string(broadcast);
      const Values got = compute(c, want.in, GetParam()).dmask;
      const Values plain = compute(c, want.in, GetParam(), 0, "reference").dmask;
      expect_near(got, want.dmask, 2 * difference(plain, want.dmask).largest + want.noise, what);
      for_each(got.shape, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
        if (want.in.mask.at(b, h, i, j) == kHidden) {
          ASSERT_EQ(got.at(b, h, i, j), 0) << what << ", key " << j;
        }
      });
    }
}

// A mask without broadcasts that has the same numbers has the same ds.
TEST(OneMaskGradient, is_the_sum_of_that_of_every_logit) {
  for (size_t index = 0; index < std::size(kCases); ++index)
    for (int broadcast = 0; broadcast < kBroadcasts; ++broadcast) {
      const Case& c = kCases[index];
      const Expected& x = expected(index, broadcast);
      Inputs whole = x.in;
      whole.mask = expanded(x.in.mask, mask_shape(c, 0));
      const Values got = compute(c, x.in, {Pass::backward, Precision::f32}).dmask,
                   of_whole = compute(c, whole, {Pass::backward, Precision::f32}).dmask;
      expect_near(got, summed(of_whole, x.in.mask.shape), 2 * x.noise, c.name);
      if (broadcast < 8) {
        EXPECT_LT(2 * x.noise, .1 * largest(got)) << c.name << ", broadcast " << broadcast << ": no power";
      }
    }
}

TEST_P(MaskGradient, does_not_depend_on_threads_and_changes_no_bit_of_the_others) {
  for (const Case& c : kCases)
    for (int broadcast = 0; broadcast < kBroadcasts; ++broadcast) {
      if (GetParam().precision != Precision::f32 && broadcast != 0b0001 && broadcast != 0b0110) continue;
      const Inputs in = with_mask(c, 3, broadcast);
      const std::string what = std::string(c.name) + ", broadcast " + std::to_string(broadcast);
      const Outputs one = compute(c, in, GetParam(), 1);
      expect_same_bits(compute(c, in, GetParam(), 5), one, Pass::backward, what + ", 5 threads against 1");
      Case without = c;
      without.dmask = false;
      Outputs others = one;
      others.dmask = Values();
      expect_same_bits(compute(without, in, GetParam()), others, Pass::backward, what + ", without dmask");
    }
}

// A row of ds sums to dlse minus what its sink has of ds: a mask of one number for each head has the sum over rows of
// dlse, minus dsinks. Without both that is 0, dropout or not.
TEST(OneMaskGradient, of_a_number_for_each_head_is_dlse_minus_dsinks) {
  for (Case c : kCases) {
    c.softcap = 0, c.window = {}, c.alignment = Alignment::unspecified;
    Inputs in = with_mask(c, 4, 0b1101);
    for (double& x : in.mask.data) x = x == kHidden ? 1 : x;
    const Outputs got = compute(c, in, {Pass::backward, Precision::f32});
    const Noise noise = f32_noise(c, in, largest_column_sum(c, in), 5);
    Values want(in.mask.shape);
    if (in.dlse.present()) want = summed(in.dlse, want.shape);
    for (int64_t h = 0; h < c.heads && got.dsinks.present(); ++h) want.at(0, h, 0, 0) -= got.dsinks.at(0, h, 0, 0);
    expect_near(got.dmask, want, noise.dmask + noise.dsinks, c.name);
  }
}

// Keys in another order, with their columns of the mask, have their columns of dmask; a query in another place its row.
TEST(OneMaskGradient, moves_with_queries_and_keys) {
  const Inputs in = with_mask(kPlain, 5, 0b0011);
  Inputs moved = in;
  const auto key = [&](int64_t j) { return (j * 37 + 11) % kPlain.tokens_k; };
  const auto query = [&](int64_t i) { return (i * 17 + 3) % kPlain.tokens_q; };
  const auto permute = [](Values& x, const Values& from, const auto& token) {
    for_each(x.shape,
             [&](int64_t b, int64_t h, int64_t t, int64_t d) { x.at(b, h, t, d) = from.at(b, h, token(t), d); });
  };
  permute(moved.k, in.k, key), permute(moved.v, in.v, key);
  permute(moved.q, in.q, query), permute(moved.do_, in.do_, query);
  for_each(in.mask.shape, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    moved.mask.at(b, h, i, j) = in.mask.at(b, h, query(i), key(j));
  });
  const Recipe f32{Pass::backward, Precision::f32};
  const Values got = compute(kPlain, moved, f32).dmask, before = compute(kPlain, in, f32).dmask;
  Values want(got.shape);
  for_each(want.shape, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    want.at(b, h, i, j) = before.at(b, h, query(i), key(j));
  });
  expect_near(got, want, 2 * f32_noise(kPlain, in, largest_column_sum(kPlain, in), 5).dmask, "permuted");
}

// Elements that no query sees, by position or for want of queries, are written.
TEST(OneMaskGradient, of_what_nobody_sees_is_zero) {
  Case causal = kPlain, no_queries = kPlain, no_keys = kPlain, no_batch = kPlain;
  causal.causal = true, causal.alignment = Alignment::top_left;
  no_queries.tokens_q = 0, no_keys.tokens_k = 0, no_batch.batch = 0;
  for (const char* backend : {"cpu", "reference"})
    for (int broadcast = 0; broadcast < kBroadcasts; ++broadcast) {
      const Recipe f32{Pass::backward, Precision::f32};
      const Values dmask = compute(causal, with_mask(causal, 6, broadcast), f32, 0, backend).dmask;
      for_each(dmask.shape, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
        if (j > (broadcast & 4 ? causal.tokens_q - 1 : i)) {
          ASSERT_EQ(dmask.at(b, h, i, j), 0) << "query " << i;
        }
      });
      for (const Case& c : {no_queries, no_keys, no_batch}) {
        const Inputs in = with_mask(c, 7, broadcast);
        if (in.mask.data.empty()) continue;
        for (const double x : compute(c, in, f32, 0, backend).dmask.data) ASSERT_EQ(x, 0) << c.name;
      }
    }
}

// A query whose do is NaN reaches the elements of dmask that sum it, and no others.
TEST(OneMaskGradient, keeps_a_query_that_is_not_finite_to_its_row) {
  Inputs in = with_mask(kPlain, 9, 0);
  in.do_.at(1, 2, 33, 5) = std::numeric_limits<double>::quiet_NaN();
  const Values dmask = compute(kPlain, in, {Pass::backward, Precision::f32}).dmask;
  for_each(dmask.shape, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    const bool lost = b == 1 && h == 2 && i == 33 && in.mask.at(b, h, i, j) != kHidden;
    ASSERT_EQ(std::isnan(dmask.at(b, h, i, j)), lost) << "query " << i << ", key " << j;
  });
}

std::vector<Recipe> backward_recipes() {
  std::vector<Recipe> list = every_recipe();
  std::erase_if(list, [](const Recipe& x) { return x.pass != Pass::backward; });
  return list;
}

INSTANTIATE_TEST_SUITE_P(Recipes, MaskGradient, testing::ValuesIn(backward_recipes()), label);

}  // namespace
}  // namespace octet::test
