// An element of P that dropout drops has no part in a call, whatever v and do hold there: the law of
// tests/laws/dropout_test.cc on a GPU, for gradients and tangents too.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "gpu/place.h"
#include "support/cases.h"

namespace octet::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kKeys = 64;
constexpr int64_t kBatch = 1, kKey = 17, kChannel = 3, kQuery = 21, kHead = 1;  // where NaN is put

const Case kCase{.name = "dropout",
                 .batch = 2,
                 .heads = 2,
                 .kv_heads = 1,
                 .tokens_q = 70,
                 .tokens_k = kKeys,
                 .dim_v = kKeys,
                 .dropout_p = .3};

class GpuDropout : public testing::TestWithParam<Precision> {
 protected:
  void SetUp() override {
    if (!gpu_has_dropout(GetParam())) GTEST_SKIP() << "this backend computes no dropout";
    in_ = draw(kCase, 1);
    // v is the unit matrix, so that o is P.
    for_each(in_.v.shape, [&](int64_t b, int64_t h, int64_t t, int64_t e) { in_.v.at(b, h, t, e) = t == e; });
    kept_ = run(in_, Pass::forward);
  }
  Outputs run(const Inputs& in, Pass pass, const Outputs* saved = nullptr) const {
    GpuPlace place;
    return test::run(kCase, in, attention_of(kCase, GetParam(), gpu_backend()), pass, saved, &place);
  }
  bool keeps(int64_t b, int64_t h, int64_t i, int64_t j) const { return kept_.o.at(b, h, i, j) != 0; }
  // Returns whether the query keeps the key whose v is NaN.
  bool meets_v(int64_t b, int64_t h, int64_t i) const { return b == kBatch && keeps(b, h, i, kKey); }
  template <class F>
  void each_query(const F& f) const {
    for_each(kept_.lse.shape, [&](int64_t b, int64_t h, int64_t i, int64_t) { f(b, h, i); });
  }

  Inputs in_;
  Outputs kept_;
};

TEST_P(GpuDropout, v_reaches_the_queries_that_keep_it) {
  Inputs in = in_;
  in.v.at(kBatch, 0, kKey, kChannel) = kNaN;
  const Outputs got = run(in, Pass::forward);
  each_query([&](int64_t b, int64_t h, int64_t i) {
    EXPECT_EQ(std::isnan(got.o.at(b, h, i, kChannel)), meets_v(b, h, i)) << "query " << i;
    if (meets_v(b, h, i)) return;
    EXPECT_NEAR(got.o.at(b, h, i, kChannel), kept_.o.at(b, h, i, kChannel), 1e-3) << "query " << i;
  });
}

TEST_P(GpuDropout, gradients_come_from_what_is_kept) {
  if (!gpu_computes(Pass::backward, GetParam())) GTEST_SKIP() << "this backend computes no such backward pass";
  Inputs in = in_;
  in.v.at(kBatch, 0, kKey, kChannel) = kNaN;
  const Outputs of_v = run(in, Pass::backward, &kept_);  // o is that of the finite v
  each_query([&](int64_t b, int64_t h, int64_t i) {
    EXPECT_EQ(std::isnan(of_v.dq.at(b, h, i, 0)), meets_v(b, h, i)) << "dq of query " << i;
  });
  in = in_;
  in.do_.at(kBatch, kHead, kQuery, kChannel) = kNaN;
  const Outputs of_do = run(in, Pass::backward, &kept_);
  for (int64_t j = 0; j < kKeys; ++j) {
    EXPECT_EQ(std::isnan(of_do.dv.at(kBatch, 0, j, kChannel)), keeps(kBatch, kHead, kQuery, j)) << "dv of key " << j;
    EXPECT_FALSE(std::isnan(of_do.dv.at(kBatch, 0, j, kChannel + 1))) << "dv of key " << j;
  }
}

TEST_P(GpuDropout, tangents_come_from_what_is_kept) {
  if (!gpu_computes(Pass::jvp, GetParam()) || !gpu_has_dropout(GetParam(), Pass::jvp))
    GTEST_SKIP() << "this backend computes no such jvp pass";
  Inputs in = in_;
  in.tv.at(kBatch, 0, kKey, kChannel) = kNaN;
  const Outputs got = run(in, Pass::jvp);
  each_query([&](int64_t b, int64_t h, int64_t i) {
    EXPECT_EQ(std::isnan(got.to.at(b, h, i, kChannel)), meets_v(b, h, i)) << "query " << i;
    EXPECT_FALSE(std::isnan(got.o.at(b, h, i, kChannel))) << "query " << i;
  });
}

INSTANTIATE_TEST_SUITE_P(Precisions, GpuDropout,
                         testing::Values(Precision::f32, Precision::f16, Precision::bf16, Precision::int8_f16),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace octet::test
