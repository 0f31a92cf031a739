// The CPU backend on real activations.
#include "passes/real.h"

#include <gtest/gtest.h>

namespace octet::test {
namespace {

const Tested kCpu{"cpu"};

class RealActivations : public testing::TestWithParam<RealBar> {};

TEST_P(RealActivations, hold_their_bars) { expect_real_bar(kCpu, GetParam()); }

INSTANTIATE_TEST_SUITE_P(Bars, RealActivations,
                         testing::Values(kRealBf16, kRealInt8, kRealInt8F16,
                                         RealBar{"int8_fp8", Precision::int8_fp8, DType::f32, .028, 0, 0, 0},
                                         RealBar{"fp8", Precision::fp8, DType::f32, .040, 0, 0, 0}),
                         [](const auto& info) { return std::string(info.param.row); });

class RealCaches : public testing::TestWithParam<RealCacheBar> {};

TEST_P(RealCaches, of_8_bits_hold_their_bars) { expect_real_cache_bar(kCpu, GetParam(), Precision::f32); }

INSTANTIATE_TEST_SUITE_P(Bars, RealCaches, testing::ValuesIn(kRealCacheBars),
                         [](const auto& info) { return std::string(info.param.row); });

class RealGradients : public testing::TestWithParam<Precision> {};

TEST_P(RealGradients, err_as_the_rounding_points_cost) {
  expect_real_gradients_to_err_as_rounding_costs(kCpu, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Bars, RealGradients, testing::Values(Precision::fp8, Precision::sagebwd),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST(RealActivations, without_bias_correction_miss_the_bar) {
  expect_that_without_bias_correction_real_dq_misses(kCpu);
}

}  // namespace
}  // namespace octet::test
