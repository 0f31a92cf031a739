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

bool left_to_sm80(const Problem& p, bool copies_keys = false) {
  return splitting_keys_is_faster(p, kMultiprocessors, copies_keys);
}

struct Measured {
  int batch, heads, kv_heads, queries, keys;
  double sm90, sm80;   // microseconds
  bool pages = false;  // the keys lie in pages, which sm90 copies
};

// On an H200, in bf16 at head dim 128: the choice costs at most a seventh of the time.
TEST(FewQueries, TheFasterOfWhatWasMeasured) {
  constexpr Measured kAll[] = {
      {1, 8, 8, 1, 256, 8.9, 9.0},
      {1, 8, 8, 1, 512, 11.4, 9.6},
      {1, 8, 8, 64, 512, 12.5, 11.4},
      {1, 8, 8, 64, 32768, 323.6, 50.1},
      {1, 32, 8, 1, 512, 10.1, 10.3},
      {1, 32, 8, 1, 32768, 323.2, 42.4},
      {1, 32, 8, 16, 1024, 15.6, 12.3},
      {1, 32, 8, 64, 1024, 15.5, 17.4},
      {1, 32, 8, 64, 8192, 85.2, 50.1},
      {2, 32, 8, 64, 2048, 27.0, 33.3},
      {2, 32, 8, 64, 32768, 325.3, 248.8},
      {4, 32, 8, 1, 512, 10.7, 11.6},
      {4, 32, 8, 1, 8192, 86.2, 41.3},
      {4, 32, 8, 16, 512, 11.1, 13.6},
      {4, 32, 8, 64, 8192, 88.7, 132.5},
      {1, 64, 64, 1, 512, 12.7, 13.0},
      {1, 64, 64, 1, 32768, 341.5, 245.2},
      {1, 64, 64, 64, 1024, 17.2, 27.8},
      {16, 32, 8, 1, 256, 23.9, 9.5},
      {16, 32, 8, 1, 32768, 1419.4, 480.4},
      {16, 32, 8, 16, 256, 25.6, 13.5},
      {16, 32, 8, 16, 8192, 370.1, 150.5},
      {16, 32, 8, 64, 8192, 361.2, 556.7},
      {4, 32, 32, 1, 2048, 36.8, 39.8},
      {4, 32, 32, 1, 8192, 134.2, 128.0},
      {16, 32, 32, 1, 8192, 513.0, 486.0},
      {64, 32, 32, 1, 512, 132.7, 133.2},
      {64, 32, 16, 1, 2048, 378.0, 246.4},
      {64, 32, 32, 16, 2048, 513.3, 500.3},
      {16, 32, 16, 16, 512, 37.3, 24.1},
      {16, 32, 8, 16, 2048, 96.5, 50.4},
      {64, 32, 8, 64, 2048, 386.6, 553.0},
      {1, 32, 16, 64, 2048, 25.5, 21.9},
      {16, 32, 32, 1, 128, 19.2, 16.2},
      {16, 32, 32, 4, 128, 20.6, 16.8},
      {1, 32, 8, 1, 2048, 36.0, 11.3, true},
      {4, 32, 32, 1, 512, 37.9, 13.7, true},
      {4, 32, 32, 1, 8192, 428.7, 129.0, true},
      {16, 32, 32, 4, 2048, 438.5, 139.1, true},
      {64, 32, 32, 1, 2048, 1633.8, 495.2, true},
      {64, 32, 32, 16, 512, 461.1, 143.3, true},
      {1, 32, 8, 16, 512, 20.7, 11.9, true},
      {4, 32, 8, 4, 512, 31.6, 12.5, true},
      {4, 32, 8, 64, 2048, 70.6, 47.6, true},
      {16, 32, 16, 64, 2048, 286.1, 186.7, true},
      {16, 32, 8, 64, 8192, 689.3, 596.5, true},
      {64, 32, 8, 64, 512, 270.2, 169.3, true},
      {1, 32, 32, 64, 8192, 171.4, 59.4, true},
  };
  for (const Measured& x : kAll) {
    const Problem p = problem(x.batch, x.heads, x.kv_heads, x.queries, x.keys);
    const double time = left_to_sm80(p, x.pages) ? x.sm80 : x.sm90;
    EXPECT_LE(time, 7. / 6 * std::min(x.sm90, x.sm80))
        << "batch " << x.batch << ", " << x.heads << " / " << x.kv_heads << " heads, " << x.queries << " queries, "
        << x.keys << " keys" << (x.pages ? " in pages" : "");
  }
}

TEST(FewQueries, OthersStay) {
  EXPECT_TRUE(left_to_sm80(problem(1, 32, 32, 64, 1 << 20)));
  EXPECT_FALSE(left_to_sm80(problem(1, 32, 32, 65, 1 << 20)));  // more queries than a tile has rows
  EXPECT_FALSE(left_to_sm80(problem(1, 32, 32, 0, 1 << 20)));   // nothing to compute
  EXPECT_TRUE(left_to_sm80(problem(8, 32, 8, 17, 1 << 20)));    // two tiles for each head of k
  EXPECT_FALSE(left_to_sm80(problem(16, 32, 8, 33, 1 << 20)));  // three
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
