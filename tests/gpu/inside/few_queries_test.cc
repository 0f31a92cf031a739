// Tests of which problems of few queries sm90 leaves to sm80. They need no GPU.
#include "cuda/scheduler/few_queries.h"

#include <gtest/gtest.h>

namespace octet::cuda {
namespace {

constexpr int kMultiprocessors = 132;  // of an H200

Problem problem(int64_t batch, int64_t heads, int64_t queries, int64_t keys) {
  Problem p{};
  p.pass = OCTET_FORWARD, p.precision = OCTET_PRECISION_BF16, p.bias_correction = OCTET_BIAS_CORRECTION_F16;
  p.batch = batch, p.heads = p.kv_heads = heads, p.tokens_q = queries, p.tokens_k = keys, p.dim = p.dim_v = 128;
  p.o.shape[0] = batch, p.o.shape[1] = heads, p.o.shape[2] = queries, p.o.shape[3] = p.dim_v;
  p.left = p.right = Problem::kUnbounded;
  return p;
}

bool left_to_sm80(const Problem& p) { return splitting_keys_is_faster(p, kMultiprocessors); }

TEST(FewQueries, LongKeysOfFewHeadsAreSplit) {
  for (const int queries : {1, 2, 17, 64})
    for (const int keys : {1024, 4096, 1 << 20}) {
      EXPECT_TRUE(left_to_sm80(problem(1, 32, queries, keys))) << queries << " queries, " << keys << " keys";
      EXPECT_TRUE(left_to_sm80(problem(2, 33, queries, keys))) << queries << " queries, " << keys << " keys";
    }
}

TEST(FewQueries, OthersAreNot) {
  EXPECT_FALSE(left_to_sm80(problem(1, 32, 65, 1 << 20)));  // more queries than a tile of sm80 has rows
  EXPECT_FALSE(left_to_sm80(problem(1, 32, 1, 1023)));      // too few keys
  EXPECT_FALSE(left_to_sm80(problem(1, 67, 1, 1 << 20)));   // more than half of the multiprocessors have work
  EXPECT_FALSE(left_to_sm80(problem(1, 32, 0, 1 << 20)));   // nothing to compute
}

TEST(FewQueries, KeysThatNoQuerySeesDoNotCount) {
  Problem p = problem(1, 8, 1, 1 << 20);
  p.windowed = p.bottom_right = true;
  p.right = 0;
  EXPECT_TRUE(left_to_sm80(p));
  p.left = 500;
  EXPECT_FALSE(left_to_sm80(p));
  p.left = Problem::kUnbounded, p.bottom_right = false;
  EXPECT_FALSE(left_to_sm80(p));
}

// sm80 has no instances for these.
TEST(FewQueries, CorrectionsThatNeedManyRowsStay) {
  Problem beta = problem(1, 8, 1, 1 << 20);
  beta.bias_correction = OCTET_BIAS_CORRECTION_BETA;
  EXPECT_FALSE(left_to_sm80(beta));
  Problem keeps_o = problem(1, 8, 1, 1 << 20);
  keeps_o.o_residual.dtype = OCTET_BF16;
  EXPECT_TRUE(keeps_exact_o(keeps_o));
  EXPECT_FALSE(left_to_sm80(keeps_o));
  keeps_o.precision = OCTET_PRECISION_F16;
  EXPECT_TRUE(left_to_sm80(keeps_o));
}

// Where no bound on the lengths of sequences is given, one may have all tokens.
TEST(FewQueries, BoundsOfPackedSequencesCount) {
  Problem p = problem(1, 8, 4, 1 << 20);
  p.cu_seqlens_q.dtype = p.cu_seqlens_k.dtype = OCTET_I32;
  p.cu_seqlens_q.shape[3] = p.cu_seqlens_k.shape[3] = 5;  // four sequences
  EXPECT_TRUE(left_to_sm80(p));
  p.max_seqlen_k = 1000;
  EXPECT_FALSE(left_to_sm80(p));
  p.max_seqlen_k = 0, p.tokens_q = p.o.shape[2] = 200;
  EXPECT_FALSE(left_to_sm80(p));
  p.max_seqlen_q = 50;
  EXPECT_TRUE(left_to_sm80(p));
}

}  // namespace
}  // namespace octet::cuda
