// Keys in a KV cache on the CPU: lengths of each sequence, and pages in any order.
#include "support/cache.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "support/random_problems.h"
#include "support/row_bars.h"

namespace octet::test {
namespace {

TEST(Caches, are_right_in_every_row) {
  const auto [first, count] = draws(100);
  for (uint64_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE("OCTET_RANDOM_SEED=" + std::to_string(seed));
    const RandomCache x = random_cache(seed);
    const Outputs got = run_cached(x.c, x.in, x.attention, x.how, seed), want = exact(x.c, x.numbers, Pass::forward);
    const RowBars bars = row_bars(x.c, x.numbers, x.attention, Pass::forward, want, {});
    EXPECT_EQ(wrong_row(got, want, bars, Pass::forward), "");
  }
}

Case of_sequences(const char* name) {
  return {.name = name,
          .heads = 4,
          .kv_heads = 2,
          .tokens_q = 40,
          .tokens_k = 331,
          .causal = true,
          .alignment = Alignment::bottom_right,
          .cu_seqlens_q = {0, 10, 20, 30, 40},
          .cu_seqlens_k = {0, 100, 230, 231, 331},
          .dtype = DType::bf16,
          .sinks = Sinks::shared};
}

// The keys of a sequence are divided into the same tiles wherever they lie.
TEST(Caches, give_the_bits_of_packed_sequences) {
  const Case c = of_sequences("bits");
  const Inputs in = draw(c, 3);
  for (const char* backend : {"cpu", "reference"})
    for (const Precision precision : precisions_of(Pass::forward)) {
      if (precision == Precision::f64 && std::string(backend) == "cpu") continue;
      const Attention attention = attention_of(c, precision, backend);
      SCOPED_TRACE(std::string(backend) + " " + name(precision));
      const auto cached = [&](int64_t page_size, bool packed_q) {
        return run_cached(c, in, attention, {.page_size = page_size, .packed_q = packed_q}, 5);
      };
      Case same = c;
      if (precision == Precision::f64) same.dtype = DType::bf16;
      const Outputs want = run(same, in, attention, Pass::forward);
      for (const Outputs& got : {cached(16, true), cached(64, false), cached(0, false)}) {
        EXPECT_EQ(difference(got.o, want.o).largest, 0.0);
        EXPECT_EQ(difference(got.lse, want.lse).largest, 0.0);
      }
    }
}

TEST(Caches, may_share_pages) {
  const Case c = of_sequences("shared");
  Inputs in = draw(c, 3);
  const Cache apart(c, in, {}, 5);
  for (Values* x : {&in.k, &in.v})
    for_each({1, x->shape[1], 64, x->shape[3]}, [&](int64_t, int64_t h, int64_t t, int64_t i) {
      x->at(0, h, 100 + t, i) = x->at(0, h, 231 + t, i) = x->at(0, h, t, i);
    });
  EXPECT_EQ(Cache(c, in, {}, 5).pages, apart.pages - 2 * 64 / 16);
  const Attention attention = attention_of(c, Precision::f32, nullptr);
  const Outputs want = run(c, in, attention, Pass::forward), got = run_cached(c, in, attention, {}, 5);
  EXPECT_EQ(difference(got.o, want.o).largest, 0.0);
}

// A cache of batch elements that queries take in another order: each has one page, of any number of tokens.
TEST(Caches, of_one_page_have_any_size) {
  const Case c = of_sequences("one_page");
  const Inputs in = draw(c, 3);
  const Attention attention = attention_of(c, Precision::f32, nullptr);
  const Outputs want = run(c, in, attention, Pass::forward);
  for (const bool packed_q : {false, true}) {
    const CacheLayout how{.page_size = 131, .packed_q = packed_q, .spare_columns = 0};
    EXPECT_EQ(difference(run_cached(c, in, attention, how, 5).o, want.o).largest, 0.0);
  }
}

}  // namespace
}  // namespace octet::test
