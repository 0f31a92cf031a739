// Gradients of mask tensors on the GPU: of every broadcast against float64, the same bits in every run, and what may
// not reach them.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "gpu/place.h"
#include "support/broadcast_masks.h"
#include "support/random_problems.h"

namespace octet::test {
namespace {

Attention on_gpu(const Case& c, Precision precision) { return attention_of(c, precision, gpu_backend()); }

Outputs gradients(const Case& c, const Inputs& in, Precision precision, bool deterministic = false) {
  const Outputs saved = run(c, in, attention_of(c, precision, "reference"), Pass::forward);
  Attention attention = on_gpu(c, precision);
  attention.deterministic = deterministic;
  GpuPlace place;
  return run(c, in, attention, Pass::backward, &saved, &place);
}

// Two tiles or more of queries and of keys, of which the last are not whole; rows of masks start at multiples of 16
// bytes in the first.
const Case kPlain{.name = "plain",
                  .batch = 2,
                  .heads = 4,
                  .kv_heads = 2,
                  .tokens_q = 70,
                  .tokens_k = 140,
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

class GpuMaskGradients : public testing::TestWithParam<Precision> {
 protected:
  void SetUp() override {
    if (!gpu_gives_dmask(GetParam()))
      GTEST_SKIP() << "this backend computes no gradient of masks in " << name(GetParam());
  }
};

TEST_P(GpuMaskGradients, are_sums_over_what_the_mask_broadcasts) {
  for (const Case& c : {kPlain, kTerms})
    for (int broadcast = 0; broadcast < kBroadcasts; ++broadcast) {
      SCOPED_TRACE(testing::Message() << c.name << ", broadcast " << broadcast);
      const Inputs in = with_mask(c, 2, broadcast);
      const Values want = exact(c, in, Pass::backward).dmask;
      const Attention reference = attention_of(c, GetParam(), "reference");
      const Outputs saved = run(c, in, reference, Pass::forward);
      const Values plain = run(c, in, reference, Pass::backward, &saved).dmask;
      const Values got = gradients(c, in, GetParam()).dmask;
      const double noise = f32_noise(c, in, largest_column_sum(c, in), 5).dmask;
      const Difference error = difference(got, want);
      EXPECT_LE(error.largest, 2 * difference(plain, want).largest + noise) << text(error);
      for_each(got.shape, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
        if (in.mask.at(b, h, i, j) == kHidden) ASSERT_EQ(got.at(b, h, i, j), 0) << "query " << i << ", key " << j;
      });
    }
}

// Sums of dq in floats have no order; dmask has one in every call.
TEST_P(GpuMaskGradients, are_the_same_bits_in_every_run) {
  for (const int broadcast : {0b0001, 0b0011, 0b0111, 0b1011, 0b1111}) {
    const Inputs in = with_mask(kTerms, 3, broadcast);
    const Outputs first = gradients(kTerms, in, GetParam(), true);
    for (const bool deterministic : {true, false}) {
      const Outputs again = gradients(kTerms, in, GetParam(), deterministic);
      EXPECT_EQ(std::memcmp(again.dmask.data.data(), first.dmask.data.data(), 8 * first.dmask.data.size()), 0)
          << "broadcast " << broadcast << ", deterministic " << deterministic;
    }
  }
}

// A query whose do is NaN reaches the elements of dmask that sum it, and no others: not those that are hidden from it.
TEST_P(GpuMaskGradients, keep_a_query_that_is_not_finite_to_its_row) {
  Case causal = kPlain;
  causal.causal = true, causal.alignment = Alignment::top_left;
  for (const int broadcast : {0b0000, 0b0111}) {
    Inputs in = with_mask(causal, 9, broadcast);
    in.do_.at(1, 2, 33, 5) = std::numeric_limits<double>::quiet_NaN();
    const Values dmask = gradients(causal, in, GetParam()).dmask;
    for_each(dmask.shape, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
      const bool row = broadcast || (b == 1 && h == 2 && i == 33);
      const bool lost = row && j <= 33 && in.mask.at(b, h, i, j) != kHidden;
      ASSERT_EQ(std::isnan(dmask.at(b, h, i, j)), lost)
          << "broadcast " << broadcast << ", query " << i << ", key " << j;
    });
  }
}

// A key whose v is inf and which nobody sees reaches nothing.
TEST_P(GpuMaskGradients, ignore_keys_that_nobody_sees) {
  for (const int broadcast : {0b0011, 0b0111}) {
    Inputs in = with_mask(kPlain, 10, broadcast);
    for (int64_t i = 0; i < in.mask.shape[2]; ++i) in.mask.at(0, 0, i, 77) = kHidden;
    const Values want = gradients(kPlain, in, GetParam()).dmask;
    for (int64_t d = 0; d < kPlain.dim_v; ++d)
      in.v.at(0, 1, 77, d) = d % 2 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
    const Values got = gradients(kPlain, in, GetParam()).dmask;
    EXPECT_EQ(std::memcmp(got.data.data(), want.data.data(), 8 * got.data.size()), 0) << "broadcast " << broadcast;
  }
}

TEST_P(GpuMaskGradients, are_zero_without_tokens) {
  Case no_queries = kPlain, no_keys = kPlain, no_batch = kPlain;
  no_queries.tokens_q = 0, no_keys.tokens_k = 0, no_batch.batch = 0;
  for (const Case& c : {no_queries, no_keys, no_batch})
    for (const int broadcast : {0b0001, 0b0100, 0b0111, 0b1000, 0b1111}) {
      const Inputs in = with_mask(c, 7, broadcast);
      if (in.mask.data.empty()) continue;
      for (const double x : gradients(c, in, GetParam()).dmask.data) ASSERT_EQ(x, 0) << c.name << ' ' << broadcast;
    }
}

INSTANTIATE_TEST_SUITE_P(Precisions, GpuMaskGradients, testing::Values(Precision::f32, Precision::f16, Precision::bf16),
                         [](const auto& info) { return std::string(name(info.param)); });

// Masks of every broadcast, type and layout, with all other options, row by row in f32.
TEST(GpuMaskGradients, of_random_problems_are_right) {
  if (!gpu_gives_dmask(Precision::f32)) GTEST_SKIP() << "this backend computes no gradient of masks";
  const auto [first, count] = draws(20);
  uint64_t solved = 0;
  const Solver gpu{gpu_backend(), [] { return std::make_unique<GpuPlace>(); }};
  for (uint64_t seed = first; solved < count; ++seed) {
    RandomProblem x = random_problem(seed);
    if (x.pass != Pass::backward || x.in.mask.data.empty() || x.in.mask_dtype == DType::boolean) continue;
    if (x.attention.precision != Precision::f32) continue;
    x.c.dmask = true;
    solved += expect_right(x, gpu) == Outcome::solved;
  }
}

}  // namespace
}  // namespace octet::test
