// Keys in a KV cache on a GPU: random problems against float64, and that queries split over a cache see all of it.
#include "support/cache.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gpu/place.h"
#include "passes/real.h"
#include "support/random_problems.h"
#include "support/row_bars.h"

namespace octet::test {
namespace {

// Returns what a backend gives, or nothing where it rejects the problem.
std::optional<Outputs> solved(const RandomCache& x, uint64_t seed, std::string* explained) {
  GpuPlace place;
  try {
    return run_cached(x.c, x.in, x.attention, x.how, seed, &place, explained);
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), OCTET_UNSUPPORTED) << error.what();
    EXPECT_FALSE(tests_sm80()) << "rejected: " << error.what();
    return {};
  }
}

void expect_right(const RandomCache& x, uint64_t seed, std::string* explained = nullptr) {
  const std::optional<Outputs> got = solved(x, seed, explained);
  if (!got) return;
  const Outputs want = exact(x.c, x.numbers, Pass::forward);
  const RowBars bars = row_bars(x.c, x.numbers, x.attention, Pass::forward, want, {});
  EXPECT_EQ(wrong_row(*got, want, bars, Pass::forward), "");
}

TEST(GpuCaches, are_right_in_every_row) {
  const auto [first, count] = draws(100);
  for (uint64_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE("OCTET_RANDOM_SEED=" + std::to_string(seed));
    expect_right(random_cache(seed), seed);
  }
}

// One query, or few, over so many keys that they are split.
TEST(GpuCaches, are_right_where_keys_are_split) {
  for (const int64_t page_size : {0, 16, 64})
    for (const int64_t dim : {64, 128, 256, 512})
      for (const DType dtype : {DType::f16, DType::bf16}) {
        if (dim > gpu_most_dim(Precision::bf16)) continue;
        RandomCache x;
        x.c = {.name = "split", .heads = 4, .kv_heads = 2, .dim = dim, .dim_v = dim, .dtype = dtype};
        x.c.cu_seqlens_q = {0, 3, 6, 9}, x.c.cu_seqlens_k = {0, 700, 700, 1211};
        x.c.tokens_q = 9, x.c.tokens_k = 1211, x.c.causal = true, x.c.alignment = Alignment::bottom_right;
        x.in = x.numbers = draw(x.c, 7);
        x.attention = attention_of(x.c, dtype == DType::f16 ? Precision::f16 : Precision::bf16, nullptr);
        x.how = {.page_size = page_size, .packed_q = false};
        SCOPED_TRACE(std::to_string(page_size) + ", " + std::to_string(dim));
        // The reference of the bars: P in the precision's own type, as few queries have it.
        x.attention.bias_correction = BiasCorrection::none;
        std::string explained;
        expect_right(x, 7, &explained);
        if (tests_sm80()) {
          EXPECT_NE(explained.find("keys in pages"), std::string::npos) << explained;
          EXPECT_NE(explained.find(" splits"), std::string::npos) << explained;
        }
      }
}

// Few queries over codes, which kernels read in their pages: lengths of 0, masks, groups of 1 to 6 heads, whose rows
// are in several tiles where there are more than 16.
TEST(GpuCaches, of_codes_are_read_in_their_pages) {
  if (!tests_sm80()) GTEST_SKIP() << "this backend computes no codes";
  struct Shape {
    int64_t queries, heads, kv_heads, dim, dim_v, window;
    double softcap;
    Alibi alibi;
    Sinks sinks;
  };
  constexpr Shape kShapes[] = {{1, 8, 2, 128, 128, 0, 0, Alibi::none, Sinks::none},
                               {3, 4, 2, 64, 64, 0, 0, Alibi::none, Sinks::shared},
                               {5, 6, 1, 256, 256, 200, 0, Alibi::none, Sinks::none},
                               {7, 3, 3, 112, 48, 0, 5, Alibi::shared, Sinks::shared},
                               {40, 4, 4, 80, 128, 333, 0, Alibi::none, Sinks::none}};
  uint64_t seed = 0;
  for (const Shape& shape : kShapes)
    for (const int64_t page_size : {0, 16, 64})
      for (const DType codes : {DType::i8, DType::e4m3}) {
        ++seed;
        RandomCache x;
        x.c = {.name = "codes", .heads = shape.heads, .kv_heads = shape.kv_heads, .dim = shape.dim};
        x.c.dim_v = shape.dim_v, x.c.dtype = seed % 2 ? DType::bf16 : DType::f16, x.c.out_dtype = DType::f32;
        const auto n = static_cast<int32_t>(shape.queries);
        x.c.cu_seqlens_q = {0, n, 2 * n, 3 * n}, x.c.cu_seqlens_k = {0, 700, 700, 1211};
        x.c.tokens_q = 3 * n, x.c.tokens_k = 1211, x.c.causal = true, x.c.alignment = Alignment::bottom_right;
        if (shape.window) x.c.window = {{shape.window, 0}};
        x.c.softcap = shape.softcap, x.c.alibi = shape.alibi, x.c.sinks = shape.sinks;
        const Precision precision = seed % 2 ? Precision::bf16 : Precision::f16;
        x.how = {.page_size = page_size, .packed_q = seed % 3 == 0 && page_size && n < 20, .codes = codes};
        x.how.kv = seed % 5 < 2 ? Layout::bthd : Layout::bhtd;
        x.in = draw(x.c, seed), x.numbers = as_cached(x.in, x.how);
        x.attention = attention_of(x.c, precision, nullptr);
        x.attention.bias_correction = BiasCorrection::none;
        SCOPED_TRACE("head dim " + std::to_string(shape.dim) + ", pages of " + std::to_string(page_size) + ", " +
                     (codes == DType::i8 ? "i8" : "e4m3"));
        std::string explained;
        expect_right(x, seed, &explained);
        EXPECT_NE(explained.find("keys in pages"), std::string::npos) << explained;
      }
}

TEST(GpuCaches, of_codes_hold_their_bars_on_real_activations) {
  if (!tests_sm80()) GTEST_SKIP() << "this backend computes no codes";
  const Tested gpu{gpu_backend(), [] { return std::make_unique<GpuPlace>(); }};
  for (const RealCacheBar& bar : kRealCacheBars)
    for (const Precision precision : {Precision::bf16, Precision::f16}) {
      if (!bar.queries) continue;  // more than these are computed from numbers
      SCOPED_TRACE(std::string(bar.row) + ", " + name(precision));
      std::string explained;
      expect_real_cache_bar(gpu, bar, precision, &explained);
      EXPECT_NE(explained.find("keys in pages"), std::string::npos) << explained;
    }
}

// A token that is not finite reaches the queries whose window has it, and no other that shares a tile with them.
TEST(GpuCaches, of_codes_hide_what_is_not_finite) {
  if (!tests_sm80()) GTEST_SKIP() << "this backend computes no codes";
  constexpr int64_t kQueries = 4, kKeys = 500, kLeft = 200, kBad = kKeys - kQueries - kLeft + 1;
  Case c{.name = "bad_codes", .heads = 4, .kv_heads = 2, .tokens_q = kQueries, .tokens_k = kKeys};
  c.cu_seqlens_q = {0, kQueries}, c.cu_seqlens_k = {0, kKeys}, c.dtype = DType::bf16, c.causal = true;
  c.window = {{kLeft, 0}}, c.alignment = Alignment::bottom_right;
  const Inputs in = draw(c, 3);
  for (const DType codes : {DType::i8, DType::e4m3})
    for (const bool of_v : {false, true}) {
      SCOPED_TRACE(std::string(codes == DType::i8 ? "i8" : "e4m3") + (of_v ? ", v" : ", k"));
      Inputs bad = in;
      for (int64_t h = 0; h < c.kv_heads; ++h) (of_v ? bad.v : bad.k).at(0, h, kBad, 7) = NAN;
      const CacheLayout how{.packed_q = false, .codes = codes};
      Attention attention = attention_of(c, Precision::bf16, nullptr);
      attention.bias_correction = BiasCorrection::none;
      std::string explained;
      GpuPlace place, bad_place;
      const Outputs want = run_cached(c, in, attention, how, 5, &place, &explained),
                    got = run_cached(c, bad, attention, how, 5, &bad_place);
      EXPECT_NE(explained.find("keys in pages"), std::string::npos) << explained;
      for_each(c.o_shape(), [&](int64_t b, int64_t h, int64_t query, int64_t channel) {
        const double x = got.o.at(b, h, query, channel), y = want.o.at(b, h, query, channel);
        // Of the queries 0 and 1 that see it, a v that is not finite may reach a channel alone.
        const bool sees = query < 2;
        if (sees && (!of_v || channel == 7)) {
          EXPECT_TRUE(std::isnan(x)) << "query " << query << ", channel " << channel;
        } else if (!sees) {
          EXPECT_NEAR(x, y, 1e-3 + 0.01 * std::abs(y)) << "query " << query << ", channel " << channel;
        }
      });
    }
}

// Every precision of 8 bits. A sequence may have as many keys in the cache as in the packed call, so that both are
// split alike.
TEST(GpuCaches, err_as_packed_sequences_do) {
  Case c{.name = "eight_bits", .heads = 4, .kv_heads = 2, .tokens_q = 40, .tokens_k = 331};
  c.cu_seqlens_q = {0, 10, 20, 30, 40}, c.cu_seqlens_k = {0, 100, 230, 231, 331}, c.dtype = DType::bf16;
  const Inputs in = draw(c, 3);
  for (const Precision precision : precisions_of(Pass::forward)) {
    if (!gpu_computes(Pass::forward, precision)) continue;
    SCOPED_TRACE(name(precision));
    const Attention attention = attention_of(c, precision, nullptr);
    GpuPlace place, packed_place;
    const Outputs want = run(c, in, attention, Pass::forward, nullptr, &packed_place);
    const CacheLayout how{.page_size = 16, .max_seqlen_k = c.tokens_k, .spare_columns = c.tokens_k / 16};
    const Outputs got = run_cached(c, in, attention, how, 5, &place);
    const Outputs of_64 = exact(c, in, Pass::forward);
    EXPECT_LE(difference(got.o, of_64.o).rms, 1.0001 * difference(want.o, of_64.o).rms);
    EXPECT_LE(difference(got.lse, of_64.lse).rms, 1.0001 * difference(want.lse, of_64.lse).rms + 1e-7);
  }
}

// Caches in 8 bits, in every precision that takes them; random problems have those of f32, whose products on a GPU are
// others than on the CPU.
TEST(GpuCaches, of_codes_err_as_on_the_cpu) {
  if (!tests_sm80()) GTEST_SKIP() << "this backend computes no codes";
  Case c{.name = "codes", .heads = 4, .kv_heads = 2, .tokens_q = 40, .tokens_k = 331};
  c.cu_seqlens_q = {0, 10, 20, 30, 40}, c.cu_seqlens_k = {0, 100, 230, 231, 331}, c.dtype = DType::bf16;
  const Inputs in = draw(c, 3);
  for (const DType codes : {DType::i8, DType::e4m3})
    for (const Precision precision : precisions_of(Pass::forward)) {
      if (precision == Precision::f32 || !gpu_computes(Pass::forward, precision)) continue;
      for (const int64_t page_size : {0, 16}) {
        SCOPED_TRACE(std::string(name(precision)) + ", pages of " + std::to_string(page_size));
        const CacheLayout how{.page_size = page_size, .packed_q = false, .codes = codes};
        GpuPlace place;
        const Outputs got = run_cached(c, in, attention_of(c, precision, nullptr), how, 5, &place);
        const Outputs cpu = run_cached(c, in, attention_of(c, precision, "cpu"), how, 5);
        const Outputs want = exact(c, as_cached(in, how), Pass::forward);
        EXPECT_LE(difference(got.o, want.o).rms, 2 * difference(cpu.o, want.o).rms);
        EXPECT_LE(difference(got.lse, want.lse).rms, 2 * difference(cpu.lse, want.lse).rms);
      }
    }
}

}  // namespace
}  // namespace octet::test
