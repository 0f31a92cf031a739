// Tests of which problems of few queries sm90 leaves to sm80. They need no GPU.
#include "cuda/fwd/few_queries.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace octet::cuda {
namespace {

constexpr int kMultiprocessors = 132;  // of an H200

Problem problem(int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries, int64_t keys) {
  Problem p{};
  p.pass = OCTET_FORWARD, p.precision = OCTET_PRECISION_BF16, p.bias_correction = OCTET_BIAS_CORRECTION_F16;
  p.batch = batch, p.heads = heads, p.kv_heads = kv_heads, p.tokens_q = queries, p.tokens_k = keys,
  p.dim = p.dim_v = 128;
  p.o.shape[0] = batch, p.o.shape[1] = heads, p.o.shape[2] = queries, p.o.shape[3] = p.dim_v;
  p.left = p.right = Problem::kUnbounded;
  return p;
}

bool left_to_sm80(const Problem& p) { return splitting_keys_is_faster(p, kMultiprocessors); }

struct Measured {
  int batch, heads, kv_heads, queries, keys;
  double sm90, sm80;  // microseconds
};

// On an H200, in bf16 at head dim 128: the choice costs at most a seventh of the time.
TEST(FewQueries, TheFasterOfWhatWasMeasured) {
  constexpr Measured kAll[] = {
      {1, 8, 8, 1, 256, 8.9, 9.0},         {1, 8, 8, 1, 512, 11.4, 9.6},         {1, 8, 8, 64, 512, 12.5, 11.4},
      {1, 8, 8, 64, 32768, 323.6, 50.1},   {1, 32, 8, 1, 512, 11.9, 9.6},        {1, 32, 8, 1, 32768, 323.2, 42.4},
      {1, 32, 8, 16, 1024, 16.9, 14.0},    {1, 32, 8, 64, 1024, 16.9, 20.4},     {1, 32, 8, 64, 8192, 86.5, 45.7},
      {2, 32, 8, 64, 2048, 27.0, 33.3},    {2, 32, 8, 64, 32768, 325.3, 248.8},  {4, 32, 8, 1, 512, 12.5, 10.9},
      {4, 32, 8, 1, 8192, 88.7, 41.7},     {4, 32, 8, 16, 512, 12.6, 17.5},      {4, 32, 8, 64, 8192, 92.1, 140.8},
      {1, 64, 64, 1, 512, 12.7, 13.0},     {1, 64, 64, 1, 32768, 341.5, 245.2},  {1, 64, 64, 64, 1024, 17.2, 27.8},
      {16, 32, 8, 1, 256, 26.0, 13.1},     {16, 32, 8, 1, 32768, 1419.4, 480.4}, {16, 32, 8, 16, 256, 23.3, 29.3},
      {16, 32, 8, 16, 8192, 340.9, 152.4}, {16, 32, 8, 64, 8192, 346.5, 748.2},
  };
  for (const Measured& x : kAll) {
    const double time = left_to_sm80(problem(x.batch, x.heads, x.kv_heads, x.queries, x.keys)) ? x.sm80 : x.sm90;
    EXPECT_LE(time, 7. / 6 * std::min(x.sm90, x.sm80)) << "batch " << x.batch << ", " << x.heads << " / " << x.kv_heads
                                                       << " heads, " << x.queries << " queries, " << x.keys << " keys";
  }
}

TEST(FewQueries, OthersStay) {
  EXPECT_TRUE(left_to_sm80(problem(1, 32, 32, 64, 1 << 20)));
  EXPECT_FALSE(left_to_sm80(problem(1, 32, 32, 65, 1 << 20)));  // more queries than a tile has rows
  EXPECT_FALSE(left_to_sm80(problem(1, 32, 32, 0, 1 << 20)));   // nothing to compute
  EXPECT_FALSE(left_to_sm80(problem(8, 32, 8, 17, 1 << 20)));   // sm80 would not split the keys
  Problem no_heads = problem(1, 0, 8, 1, 1 << 20);
  EXPECT_FALSE(left_to_sm80(no_heads));
}

TEST(FewQueries, KeysThatNoQuerySeesDoNotCount) {
  Problem p = problem(1, 8, 8, 1, 1 << 20);
  p.windowed = p.bottom_right = true;
  p.right = 0;
  EXPECT_TRUE(left_to_sm80(p));
  p.left = 200;
  EXPECT_FALSE(left_to_sm80(p));
  p.left = Problem::kUnbounded, p.bottom_right = false;
  EXPECT_FALSE(left_to_sm80(p));
}

// sm80 has no instances for these.
TEST(FewQueries, CorrectionsThatNeedManyRowsStay) {
  Problem beta = problem(1, 8, 8, 1, 1 << 20);
  beta.bias_correction = OCTET_BIAS_CORRECTION_BETA, beta.beta = 3.f;
  EXPECT_FALSE(left_to_sm80(beta));
  Problem keeps_o = problem(1, 8, 8, 1, 1 << 20);
  keeps_o.o_residual.dtype = OCTET_BF16;
  EXPECT_TRUE(keeps_exact_o(keeps_o));
  EXPECT_FALSE(left_to_sm80(keeps_o));
  keeps_o.precision = OCTET_PRECISION_F16;
  EXPECT_TRUE(left_to_sm80(keeps_o));
}

// The keys of a window of the longest sequence of a cache are split, whatever its length is.
TEST(FewQueries, WindowsOverCachesCount) {
  Problem p = problem(1, 8, 8, 4, 1 << 20);
  p.seqused_k.dtype = OCTET_I32;
  EXPECT_EQ(most_keys(p), 1 << 20);
  p.max_seqlen_k = 32768;
  EXPECT_EQ(most_keys(p), 32768);
  p.windowed = p.bottom_right = true, p.left = 4095, p.right = 0;
  EXPECT_EQ(most_keys(p), 4099);
  p.max_seqlen_k = 1000;
  EXPECT_EQ(most_keys(p), 1000);
}

// Where no bound on the lengths of sequences is given, one may have all tokens.
TEST(FewQueries, BoundsOfPackedSequencesCount) {
  Problem p = problem(1, 8, 8, 4, 1 << 20);
  p.cu_seqlens_q.dtype = p.cu_seqlens_k.dtype = OCTET_I32;
  p.cu_seqlens_q.shape[3] = p.cu_seqlens_k.shape[3] = 5;  // four sequences
  EXPECT_TRUE(left_to_sm80(p));
  p.max_seqlen_k = 200;
  EXPECT_FALSE(left_to_sm80(p));
  p.max_seqlen_k = 0, p.tokens_q = p.o.shape[2] = 200;
  EXPECT_FALSE(left_to_sm80(p));
  p.max_seqlen_q = 50;
  EXPECT_TRUE(left_to_sm80(p));
}

}  // namespace
}  // namespace octet::cuda
