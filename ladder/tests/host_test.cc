// The parts of the harness that need no GPU: the reference, RoPE, the check, the cache, the flags and the inputs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "../harness/harness.h"

namespace ladder {
namespace {

using testing::HasSubstr;

size_t some_bytes(const Problem&) { return 1; }
const Rung kRung{.name = "9_test",
                 .idea = "a rung for tests",
                 .element = Element::f16,
                 .rotates = false,
                 .dims = {64, 128},
                 .kernels = {{"all", some_bytes, nullptr, nullptr}, {"step", some_bytes, nullptr, nullptr, true}}};

std::vector<double> numbers(size_t count, unsigned seed) {
  std::vector<double> x(count);
  for (double& value : x) {
    seed = seed * 1664525u + 1013904223u;
    value = (seed >> 8) * 0x1p-22 - 2;
  }
  return x;
}

// ---- The reference

// The definition, row by row, in another order and without tiles.
std::vector<double> attention(const Problem& p, const std::vector<double>& q, const std::vector<double>& k,
                              const std::vector<double>& v) {
  std::vector<double> o(p.elements(), 0.0);
  for (int64_t row = 0; row < p.rows(); ++row) {
    const int64_t head = row / p.seq * p.seq;
    const int64_t keys = p.causal ? row % p.seq + 1 : p.seq;
    std::vector<double> exps(keys);
    double sum = 0;
    for (int64_t j = 0; j < keys; ++j) {
      double dot = 0;
      for (int c = p.dim - 1; c >= 0; --c) dot += q[row * p.dim + c] * k[(head + j) * p.dim + c];
      sum += exps[j] = std::exp(dot / std::sqrt(p.dim));
    }
    for (int c = 0; c < p.dim; ++c) {
      for (int64_t j = 0; j < keys; ++j) o[row * p.dim + c] += exps[j] / sum * v[(head + j) * p.dim + c];
    }
  }
  return o;
}

TEST(Reference, IsTheDefinition) {
  // Lengths below, at and beyond the rows and keys that the reference takes at a time.
  for (int seq : {1, 3, 4, 37, 1024, 1030}) {
    for (bool causal : {false, true}) {
      const Problem p{.batch = seq < 40 ? 2 : 1, .heads = seq < 40 ? 3 : 1, .seq = seq, .dim = 32, .causal = causal};
      const std::vector<double> q = numbers(p.elements(), 1), k = numbers(p.elements(), 2),
                                v = numbers(p.elements(), 3);
      const std::vector<double> found = reference_attention(p, q, k, v), expected = attention(p, q, k, v);
      for (int64_t i = 0; i < p.elements(); ++i) ASSERT_NEAR(found[i], expected[i], 1e-12) << seq << " " << causal;
    }
  }
}

TEST(Reference, SurvivesScoresThatExpDoesNot) {
  const Problem p{.batch = 1, .heads = 1, .seq = 5, .dim = 64};
  const std::vector<double> q(p.elements(), 100.0), v = numbers(p.elements(), 4);
  for (double x : reference_attention(p, q, q, v)) EXPECT_TRUE(std::isfinite(x));
}

// The worked example of README.md: all ones give scores of sqrt(dim), and an output of 1 whatever the weights are.
TEST(Reference, OnesGiveOnes) {
  for (int dim : {64, 128}) {
    const Problem p{.batch = 1, .heads = 2, .seq = 50, .dim = dim, .causal = true};
    const std::vector<double> ones(p.elements(), 1.0);
    for (double x : reference_attention(p, ones, ones, ones)) EXPECT_NEAR(x, 1, 1e-15);
    // They say nothing of the weights: other queries and keys give the same.
    for (double x : reference_attention(p, numbers(p.elements(), 5), numbers(p.elements(), 6), ones)) {
      EXPECT_NEAR(x, 1, 1e-14);
    }
  }
}

TEST(Reference, ProductIsTheDefinition) {
  const std::vector<double> a = numbers(6, 7);
  const std::vector<float> b = {1, 2, 3, 4, 5, 6};
  const std::vector<double> found = reference_product(a, b, 2, 3, 2);
  EXPECT_DOUBLE_EQ(found[0], a[0] * 1 + a[1] * 3 + a[2] * 5);
  EXPECT_DOUBLE_EQ(found[3], a[3] * 2 + a[4] * 4 + a[5] * 6);
}

// ---- RoPE

TEST(Rope, TurnsPairsByAnglesAndKeepsTheirLength) {
  constexpr int kSeq = 40, kDim = 8;
  const std::vector<double> x = numbers(kSeq * kDim, 8);
  for (Pairing pairing : {Pairing::halves, Pairing::interleaved}) {
    std::vector<double> turned = x;
    reference_rope(turned, 1, kSeq, kDim, pairing);
    for (int position = 0; position < kSeq; ++position) {
      for (int pair = 0; pair < kDim / 2; ++pair) {
        const int a = position * kDim + (pairing == Pairing::halves ? pair : 2 * pair);
        const int b = a + (pairing == Pairing::halves ? kDim / 2 : 1);
        // As complex numbers: (x, y) times e^(i angle), with frequencies 1, 1/10, 1/100, 1/1000 for 8 channels.
        const double angle = position * std::pow(0.1, pair);
        EXPECT_NEAR(turned[a], x[a] * std::cos(angle) - x[b] * std::sin(angle), 1e-12);
        EXPECT_NEAR(turned[b], x[a] * std::sin(angle) + x[b] * std::cos(angle), 1e-12);
      }
    }
  }
}

// What RoPE is for: scores depend on the distance of two positions alone.
TEST(Rope, ScoresDependOnTheDistance) {
  constexpr int kSeq = 64, kDim = 16;
  for (Pairing pairing : {Pairing::halves, Pairing::interleaved}) {
    std::vector<double> q(kSeq * kDim), k(kSeq * kDim);
    const std::vector<double> a = numbers(kDim, 9), b = numbers(kDim, 10);
    for (int i = 0; i < kSeq * kDim; ++i) q[i] = a[i % kDim], k[i] = b[i % kDim];
    reference_rope(q, 1, kSeq, kDim, pairing);
    reference_rope(k, 1, kSeq, kDim, pairing);
    const auto score = [&](int i, int j) {
      double sum = 0;
      for (int c = 0; c < kDim; ++c) sum += q[i * kDim + c] * k[j * kDim + c];
      return sum;
    };
    for (int i = 7; i < kSeq; ++i) EXPECT_NEAR(score(i, i - 7), score(7, 0), 1e-12);
    EXPECT_GT(std::abs(score(20, 0) - score(7, 0)), 1e-3);
  }
}

TEST(Rope, TheTableIsThatOfFloat64) {
  const int seq = 5000, dim = 128;
  const std::vector<Rotation> table = make_rotations(seq, dim);
  for (int position : {0, 1, 4999}) {
    for (int pair : {0, 1, 63}) {
      const double angle = position / std::pow(10000.0, pair / 64.0);
      EXPECT_NEAR(table[position * 64 + pair].cosine, std::cos(angle), 0x1p-24);
      EXPECT_NEAR(table[position * 64 + pair].sine, std::sin(angle), 0x1p-24);
    }
  }
}

// ---- The check

TEST(Check, PassesWithinTheBoundAlone) {
  const std::vector<double> reference = {1, 2, 2, 0, 3, 4};
  EXPECT_TRUE(compare({1, 2, 2, 0, 3, 4}, reference, 2, 1e-6, 4).passed);
  EXPECT_FALSE(compare({1, 2, 2.1f, 0, 3, 4}, reference, 2, 1e-3, 4).passed);
  EXPECT_NEAR(compare({1, 2, 2.1f, 0, 3, 4}, reference, 2, 1, 4).relative_l2, 0.1 / 3, 1e-6);
  EXPECT_FALSE(compare({1, 2, 2, 0, 3, NAN}, reference, 2, 1, 4).passed);
  EXPECT_EQ(compare({1, INFINITY, 2, 0, 3, NAN}, reference, 2, 1, 4).not_finite, 2);
  // One value that is off hides in the norm of its head, and is found by itself.
  std::vector<double> long_reference(10000, 10.0);
  std::vector<float> o(10000, 10.0f);
  o[77] = 10.5f;
  EXPECT_LT(compare(o, long_reference, 1, 1e-3, 10).relative_l2, 1e-3);
  EXPECT_FALSE(compare(o, long_reference, 1, 1e-3, 10).passed);
}

TEST(Check, BoundGrowsWithTheFormatTheLengthAndTheScores) {
  const Problem small{.seq = 64}, large{.seq = 4096};
  EXPECT_LT(error_bound(small, Element::f32, 1), error_bound(large, Element::f32, 1));
  EXPECT_LT(error_bound(small, Element::f32, 1), error_bound(small, Element::f32, 100));
  EXPECT_LT(error_bound(large, Element::f32, 50), 0x1p-11);
  EXPECT_GT(error_bound(large, Element::bf16, 50), error_bound(large, Element::f16, 50));
}

// Averages over 1 to 577 ones, by probabilities of f32 that are summed in f32: all roundings of a row go the same way.
TEST(Check, BoundHoldsForSumsOfEqualNumbers) {
  const Problem problem{.heads = 1, .seq = 577};
  std::vector<float> o;
  for (int keys = 1; keys <= problem.seq; ++keys) {
    float sum = 0;
    for (int j = 0; j < keys; ++j) sum += 1 / static_cast<float>(keys);
    o.insert(o.end(), problem.dim, sum);
  }
  const std::vector<double> ones(o.size(), 1.0);
  const double score = std::sqrt(problem.dim);
  EXPECT_FALSE(compare(o, ones, 1, error_bound(problem, Element::f32, score), 1).passed);  // that of random numbers
  EXPECT_TRUE(compare(o, ones, 1, error_bound(problem, Element::f32, score, true), 1).passed);
  o[100] += 1e-3f;
  EXPECT_FALSE(compare(o, ones, 1, error_bound(problem, Element::f32, score, true), 1).passed);
}

// ---- The cache

class CacheTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / ("ladder_cache_" + std::to_string(getpid()));
    std::filesystem::remove_all(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // Whether the result had to be computed.
  bool computes(const std::string& key, bool enabled = true, size_t count = 3) {
    bool computed = false;
    const std::vector<double> expected(count, 2.5);
    EXPECT_EQ(Cache(enabled, folder_).get(key, count, [&] { return computed = true, expected; }), expected);
    return computed;
  }
  std::filesystem::path entry() const { return std::filesystem::directory_iterator(folder_)->path(); }

  std::filesystem::path folder_;
  const std::string key_ = std::string(32, 'a');
};

TEST_F(CacheTest, ReturnsWhatItKept) {
  EXPECT_TRUE(computes(key_));
  EXPECT_FALSE(computes(key_));
  EXPECT_TRUE(computes(std::string(32, 'b')));
  EXPECT_TRUE(computes(key_, false));
}

TEST_F(CacheTest, ComputesADamagedEntryAgain) {
  computes(key_);
  const auto size = std::filesystem::file_size(entry());
  for (uintmax_t at = 0; at < size; ++at) {  // every byte of the entry, its header and its values
    {
      std::fstream file(entry(), std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(at);
      const char byte = static_cast<char>(file.get() ^ 1);
      file.seekp(at);
      file.put(byte);
    }
    ASSERT_TRUE(computes(key_)) << at;
    ASSERT_FALSE(computes(key_)) << at;
  }
  std::filesystem::resize_file(entry(), size - 8);
  EXPECT_TRUE(computes(key_));
  std::ofstream(entry(), std::ios::app) << "more";
  EXPECT_TRUE(computes(key_));
}

TEST_F(CacheTest, ComputesAnEntryOfAnotherKeyAgain) {
  computes(key_);
  std::filesystem::rename(entry(), folder_ / (std::string(32, 'b') + ".reference"));
  EXPECT_TRUE(computes(std::string(32, 'b')));
}

TEST_F(CacheTest, LeavesNothingWhereItCannotWrite) {
  std::ofstream(folder_.string()) << "a file in the place of the folder";
  EXPECT_TRUE(computes(key_));
  EXPECT_TRUE(computes(key_));
}

TEST(Hash, DependsOnEverything) {
  const auto hash = [](const std::vector<double>& x, const std::vector<float>& y, int64_t n) {
    Hash result;
    result.add(x), result.add(y), result.add(n);
    return result.hex();
  };
  const std::string first = hash({1, 2}, {3, 4}, 5);
  EXPECT_EQ(first.size(), 32u);
  EXPECT_EQ(first, hash({1, 2}, {3, 4}, 5));
  EXPECT_NE(first, hash({2, 1}, {3, 4}, 5));
  EXPECT_NE(first, hash({1, 2}, {3, 5}, 5));
  EXPECT_NE(first, hash({1, 2}, {3, 4}, 6));
  EXPECT_NE(hash({}, {0}, 5), hash({0}, {}, 5));
}

// ---- Element types and inputs

TEST(Inputs, RoundToTheNearestValueTiesToEven) {
  EXPECT_EQ(round_to(Element::f16, 1 + 0x1p-11f), 1);
  EXPECT_EQ(round_to(Element::f16, 1 + 3 * 0x1p-11f), 1 + 0x1p-9f);
  EXPECT_EQ(round_to(Element::bf16, 1 + 0x1p-8f), 1);
  EXPECT_EQ(round_to(Element::bf16, -(1 + 3 * 0x1p-8f)), -(1 + 0x1p-6f));
  EXPECT_EQ(round_to(Element::f16, 0x1p-25f), 0);
  EXPECT_EQ(round_to(Element::f16, 3 * 0x1p-25f), 0x1p-23f);
  EXPECT_EQ(round_to(Element::f16, 65519), 65504);
  EXPECT_EQ(round_to(Element::f16, -65520), -INFINITY);
  EXPECT_EQ(round_to(Element::f32, 0.1f), 0.1f);
}

TEST(Inputs, RandomValuesAreNormalAndExactInEveryType) {
  Options options;
  options.problem = {.batch = 1, .heads = 2, .seq = 600, .dim = 64};
  const Tensors tensors = make_tensors(options, Element::f16);
  double sum = 0, squares = 0;
  for (float x : tensors.k) {
    EXPECT_EQ(x, round_to(Element::f16, x));
    EXPECT_EQ(x, round_to(Element::bf16, x));
    sum += x, squares += x * x;
  }
  const double count = static_cast<double>(tensors.k.size());
  EXPECT_NEAR(sum / count, 0, 5 / std::sqrt(count));
  EXPECT_NEAR(squares / count, 1, 5 * std::sqrt(2 / count));
  EXPECT_NE(tensors.q, tensors.k);
  EXPECT_EQ(tensors.q, make_tensors(options, Element::f32).q);
}

std::string stopped(const std::function<void()>& f, int status = kUsage) {
  try {
    f();
  } catch (const Stop& stop) {
    EXPECT_EQ(stop.status, status);
    return stop.text;
  }
  ADD_FAILURE() << "nothing was rejected";
  return "";
}

TEST(Inputs, AFileOfAnotherSizeOrWithValuesBeyondTheTypeIsRejected) {
  Options options;
  options.problem = {.batch = 1, .heads = 1, .seq = 2, .dim = 4};
  options.input = Input::file;
  options.file = std::filesystem::temp_directory_path() / ("ladder_file_" + std::to_string(getpid()));
  EXPECT_THAT(stopped([&] { make_tensors(options, Element::f32); }), HasSubstr("cannot be read: No such file"));
  std::vector<float> values(25);
  for (size_t i = 0; i < values.size(); ++i) values[i] = 70000.0f - i;
  const auto write = [&](size_t count) {
    std::ofstream(options.file, std::ios::binary).write(reinterpret_cast<char*>(values.data()), count * sizeof(float));
  };
  write(25);
  EXPECT_THAT(stopped([&] { make_tensors(options, Element::f32); }), HasSubstr("holds 100 bytes, allowed: 96"));
  write(24);
  EXPECT_EQ(make_tensors(options, Element::f32).v[7], 70000.0f - 23);
  EXPECT_THAT(stopped([&] { make_tensors(options, Element::f16); }),
              HasSubstr("holds 70000.000000 at element 0 of q, allowed: finite values of f16"));
  std::filesystem::remove(options.file);
}

// ---- The flags

Options parsed(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "9_test");
  return parse(static_cast<int>(arguments.size()), arguments.data(), kRung);
}

TEST(Flags, AreRead) {
  const Options options = parsed({"--batch", "2", "--heads=3", "--seq", "100", "--dim", "128", "--causal",
                                  "--kernel=step", "--warmup=1", "--runs=7", "--constant", "--no-check", "--json",
                                  "--no-cache", "--cache-dir", "/somewhere", "--rope", "interleaved"});
  EXPECT_EQ(options.problem.batch, 2);
  EXPECT_EQ(options.problem.heads, 3);
  EXPECT_EQ(options.problem.seq, 100);
  EXPECT_EQ(options.problem.dim, 128);
  EXPECT_TRUE(options.problem.causal);
  EXPECT_EQ(options.kernel, "step");
  EXPECT_EQ(options.warmup, 1);
  EXPECT_EQ(options.runs, 7);
  EXPECT_EQ(options.input, Input::constant);
  EXPECT_FALSE(options.check);
  EXPECT_TRUE(options.json);
  EXPECT_FALSE(options.cache);
  EXPECT_EQ(options.cache_dir, "/somewhere");
  EXPECT_EQ(options.rope, Pairing::interleaved);
  EXPECT_TRUE(parsed({}).check);
  EXPECT_EQ(parsed({}).kernel, "all");
}

TEST(Flags, RejectionsNameTheValueAndTheValuesAllowed) {
  const std::vector<std::pair<std::vector<const char*>, const char*>> cases = {
      {{"--dim", "63"}, "--dim: found 63, allowed: 64, 128"},
      {{"--seq", "0"}, "--seq: found 0, allowed: whole numbers from 1 to 1048576"},
      {{"--batch", "-1"}, "--batch: found -1, allowed: whole numbers from 1 to 65535"},
      {{"--heads", "many"}, "--heads: found many, allowed: whole numbers from 1 to 65535"},
      {{"--batch", "300", "--heads", "300"}, "--batch times --heads: found 90000, allowed: at most 65535"},
      {{"--kernel", "other"}, "--kernel: found other, allowed: all, step"},
      {{"--rope", "quarters"}, "--rope: found quarters, allowed: none, halves, interleaved"},
      {{"--runs=-1"}, "--runs: found -1, allowed: whole numbers from 0 to 1000000"},
      {{"--random", "--constant"}, "--random excludes --constant"},
      {{"--check", "--no-check"}, "--check excludes --no-check"},
      {{"--file", "x", "--d-model", "64"}, "--d-model: found 64 with --file, allowed: 0"},
      {{"--kernel", "step", "--d-model", "64"}, "--kernel: found step with --d-model, allowed: all"},
      {{"--nonsense"}, "--nonsense"},
  };
  for (const auto& [arguments, text] : cases) {
    EXPECT_THAT(stopped([&, given = &arguments] { parsed(*given); }), HasSubstr(text));
  }
}

TEST(Flags, HelpNamesEveryFlag) {
  const std::string text = stopped([] { parsed({"--help"}); }, 0);
  for (const char* flag :
       {"--batch", "--heads", "--seq", "--dim", "--causal", "--kernel", "--warmup", "--runs", "--random", "--constant",
        "--file", "--check", "--no-check", "--json", "--no-cache", "--cache-dir", "--rope", "--d-model"}) {
    EXPECT_THAT(text, HasSubstr(flag));
  }
}

}  // namespace
}  // namespace ladder
