// Dropout's random numbers: Philox against its authors' vectors, the function of docs/numerics.md written out byte by
// byte, and the statistics that it promises.
#include "core/dropout.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <set>
#include <tuple>

#include "core/problem.h"

namespace octet {
namespace {

// The vectors of Random123 (kat_vectors, philox4x32 7).
TEST(Dropout, philox_gives_the_vectors_of_its_authors) {
  struct Vector {
    PhiloxWords counter;
    uint32_t key[2];
    PhiloxWords want;
  };
  const Vector vectors[] = {
      {{{0, 0, 0, 0}}, {0, 0}, {{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}}},
      {{{~0u, ~0u, ~0u, ~0u}}, {~0u, ~0u}, {{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       {0xa4093822, 0x299f31d0},
       {{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}}},
  };
  for (const Vector& x : vectors) {
    const PhiloxWords got = philox(x.key[0], x.key[1], x.counter);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(got.word[i], x.want.word[i]) << i;
  }
}

// As docs/numerics.md has it, without the tricks: 7 bits of a byte against a threshold that 16 bits choose.
bool is_dropped_byte_by_byte(const int32_t (&seed)[4], double p, int64_t sequence, int64_t head, int64_t i, int64_t j) {
  const auto n = static_cast<uint32_t>(std::nearbyint(p * 0x1p23));
  const auto group = [](int64_t t) { return static_cast<uint32_t>(4 * (t / 16) + t % 8 / 2); };
  const PhiloxWords words = philox(static_cast<uint32_t>(seed[0]), static_cast<uint32_t>(seed[1]),
                                   {{group(j), group(i), static_cast<uint32_t>(seed[3]) + static_cast<uint32_t>(head),
                                     static_cast<uint32_t>(seed[2]) + static_cast<uint32_t>(sequence)}});
  const auto byte = [&](int64_t w, int64_t b) { return words.word[w] >> (8 * b) & 0xff; };
  uint32_t common = 0;
  for (int b = 0; b < 4; ++b)
    for (int w = 0; w < 4; ++w) common |= byte(w, b) >> 7 << (4 * b + w);
  const uint32_t threshold = n / 65536 + (common < n % 65536);
  return (byte(i / 8 % 2 * 2 + j / 8 % 2, i % 2 * 2 + j % 2) & 127) < threshold;
}

TEST(Dropout, is_the_function_of_the_documents) {
  const int32_t seed[4] = {123, -7, -2, 5};  // sequences carry into no other word: the offset's low word wraps
  for (const double p : {0x1p-23, .001, .1, .25, .5, .6, .9, 1 - 0x1p-23})
    for (const int64_t sequence : {0, 1, 3})
      for (const int64_t head : {0, 31})
        for (int64_t i = 0; i < 40; ++i)
          for (int64_t j = 0; j < 40; ++j)
            ASSERT_EQ(is_dropped(dropout_stream(seed, sequence, head),
                                 static_cast<uint32_t>(std::nearbyint(p * 0x1p23)), i, j),
                      is_dropped_byte_by_byte(seed, p, sequence, head, i, j))
                << p << ' ' << sequence << ' ' << head << ' ' << i << ' ' << j;
}

// No two elements of a head share a byte: 16 of every group, at different places.
TEST(Dropout, elements_of_a_head_have_bytes_of_their_own) {
  std::set<std::tuple<uint32_t, uint32_t, int64_t, int64_t>> places;
  for (int64_t i = 0; i < 48; ++i)
    for (int64_t j = 0; j < 48; ++j)
      places.emplace(dropout_group(i), dropout_group(j), i / 8 % 2 * 2 + j / 8 % 2, i % 2 * 2 + j % 2);
  EXPECT_EQ(places.size(), 48u * 48u);
}

TEST(Dropout, a_seed_of_a_sequence_of_its_own_is_not_moved) {
  int32_t words[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  Problem p{};
  p.dropout_seed = {.dtype = OCTET_I32, .data = words, .shape = {2, 1, 1, 4}, .stride = {4, 4, 4, 1}};
  const DropoutStream own = p.dropout_stream({1, 0, 0, 0, 0, 1}, 10);
  EXPECT_TRUE(own.key0 == 5 && own.key1 == 6 && own.word2 == 18 && own.word3 == 7);
  p.dropout_seed.shape[0] = 1, p.dropout_seed.stride[0] = 0;
  const DropoutStream shared = p.dropout_stream({1, 0, 0, 0, 0, 1}, 10);
  EXPECT_TRUE(shared.key0 == 1 && shared.key1 == 2 && shared.word2 == 14 && shared.word3 == 4);
}

// 10^8 draws of each probability. The elements of a group share their threshold, so that their number has a variance of
// 16 p (1 - p) + 240 f (1 - f) / 2^14, f being what is left of 128 p. Mean and variance within five standard errors.
TEST(Dropout, of_many_draws_the_number_has_the_mean_and_the_variance_of_the_documents) {
  constexpr uint32_t kGroups = 100'000'000 / 16;
  for (const double p : {.0005, .1, .25, .5, .77}) {
    const auto dropped = static_cast<uint32_t>(std::nearbyint(p * 0x1p23));
    double sum = 0, squares = 0, fourth = 0;
    const double mean = 16 * dropped * 0x1p-23;
    for (uint32_t g = 0; g < kGroups; ++g) {
      const PhiloxWords words = philox(42, 7, dropout_counter({0, 0, 3, 9}, g / 2048, g % 2048));
      const uint32_t addend = dropout_addend(words, dropped);
      int kept = 0;
      for (int w = 0; w < 4; ++w) kept += std::popcount(dropout_kept(words.word[w], addend));
      const double off = 16 - kept - mean;
      sum += off, squares += off * off, fourth += off * off * off * off;
    }
    const double q = dropped * 0x1p-23, f = 128 * q - std::floor(128 * q);
    const double variance = 16 * q * (1 - q) + 240 * f * (1 - f) * 0x1p-14;
    EXPECT_NEAR(sum / kGroups, 0.0, 5 * std::sqrt(variance / kGroups)) << p;
    const double error = std::sqrt((fourth / kGroups - variance * variance) / kGroups);
    EXPECT_NEAR(squares / kGroups, variance, 5 * error) << p;
  }
}

// Between groups nothing is shared: the elements of neighbouring ones, of heads, sequences and offsets.
TEST(Dropout, of_neighbours_is_not_correlated) {
  constexpr int64_t kSide = 1024;
  constexpr uint32_t kHalf = kDropoutOne / 2;
  const int32_t seed[4] = {1, 0, 0, 0}, later[4] = {1, 0, 1, 0}, next_seed[4] = {2, 0, 0, 0};
  const auto correlation = [&](const DropoutStream& a, const DropoutStream& b, int64_t down, int64_t right) {
    int64_t equal = 0;
    for (int64_t i = 0; i < kSide; ++i)
      for (int64_t j = 0; j < kSide; ++j)
        equal += is_dropped(a, kHalf, i, j) == is_dropped(b, kHalf, i + down, j + right);
    return (2.0 * static_cast<double>(equal) - kSide * kSide) / kSide;  // in standard errors
  };
  const DropoutStream stream = dropout_stream(seed, 0, 0);
  for (const auto& [down, right] : {std::pair{0, 1}, {1, 0}, {1, 1}, {0, 8}, {8, 0}, {0, 2}, {2, 0}, {16, 0}, {0, 16}})
    EXPECT_LT(std::fabs(correlation(stream, stream, down, right)), 5) << down << ' ' << right;
  for (const DropoutStream& other : {dropout_stream(seed, 0, 1), dropout_stream(seed, 1, 0),
                                     dropout_stream(later, 1, 0), dropout_stream(next_seed, 0, 0)})
    EXPECT_LT(std::fabs(correlation(stream, other, 0, 0)), 5);
}

}  // namespace
}  // namespace octet
