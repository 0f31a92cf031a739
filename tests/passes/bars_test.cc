// The CPU backend against the acceptance bars of docs/numerics.md. The naive modes must fail where the bias corrections
// pass.
#include <gtest/gtest.h>

#include "passes/bias.h"

namespace octet::test {
namespace {

const Tested kCpu{"cpu"};

// Forward ------------------------------------------------------------------------------------------------------------

class Forwards : public testing::TestWithParam<ForwardBar> {};

TEST_P(Forwards, hold_their_bars) { expect_forward_bar(kCpu, GetParam()); }

constexpr Over kAllHeads = Over::all_heads;

INSTANTIATE_TEST_SUITE_P(Bars, Forwards,
                         testing::Values(bf16_forward_bar(DType::f32), bf16_forward_bar(DType::bf16),
                                         int8_forward_bar(), int8_f16_forward_bar(), int8_fp8_forward_bar(),
                                         fp8_forward_bar(), fp8_raw_forward_bar(DType::f32),
                                         fp8_raw_forward_bar(DType::e4m3), sagebwd_forward_bar()),
                         [](const auto& info) { return std::string(info.param.row); });

// Backward -----------------------------------------------------------------------------------------------------------

class Backwards : public testing::TestWithParam<BackwardBar> {};

TEST_P(Backwards, hold_their_bars) { expect_backward_bar(kCpu, GetParam()); }

INSTANTIATE_TEST_SUITE_P(Bars, Backwards,
                         testing::Values(bf16_backward_bar(BiasCorrection::none),
                                         bf16_backward_bar(BiasCorrection::gproj),
                                         bf16_backward_bar(BiasCorrection::f16),
                                         BackwardBar{"int8",
                                                     Precision::int8,
                                                     BiasCorrection::f16,
                                                     {{"B1", {.0134, .0134, .0105}},
                                                      {"B2", {.0191, .0215, .0184}},
                                                      {"B3", {.0136, .0136, .0095}},
                                                      {"B4", {.0156, .0145, .0098}},
                                                      {"B5", {.0131, .0138, .0095}},
                                                      {"B6", {.0261, .0264, .0219}}},
                                                     .9996},
                                         BackwardBar{"fp8",
                                                     Precision::fp8,
                                                     BiasCorrection::f16,
                                                     {{"B1", {.061, .061, .061}},
                                                      {"B2", {.098, .098, .098}},
                                                      {"B3", {.060, .060, .060}},
                                                      {"B4", {.091, .091, .091}},
                                                      {"B5", {.056, .056, .056, kAllHeads}}},
                                                     .9958},
                                         sagebwd_backward_bar()),
                         [](const auto& info) { return std::string(info.param.row); });

TEST(Backwards, without_bias_correction_fail_on_a_common_offset) {
  expect_that_without_bias_correction_a_common_offset_ruins_dq(kCpu);
}

TEST(Backwards, of_bias_correction_f16_err_little_more_than_their_outputs_round) {
  expect_gradients_to_err_little_more_than_outputs_round(kCpu);
}

// Jvp ----------------------------------------------------------------------------------------------------------------

class Tangents : public testing::TestWithParam<Precision> {};

TEST_P(Tangents, hold_their_bars) { expect_jvp_bars(kCpu, GetParam(), 1024); }

INSTANTIATE_TEST_SUITE_P(Bars, Tangents, testing::Values(Precision::bf16, Precision::f16),
                         [](const auto& info) { return std::string(name(info.param)); });

// Bias ---------------------------------------------------------------------------------------------------------------

TEST(Bias, delta_s7) { expect_unbiased_delta(kCpu, Tied::s7); }
TEST(Bias, delta_s8) { expect_unbiased_delta(kCpu, Tied::s8); }
TEST(Bias, dq_s8) { expect_unbiased_dq_on_s8(kCpu, BiasCorrection::f16); }
TEST(Bias, dq_s8_gproj) { expect_unbiased_dq_on_s8(kCpu, BiasCorrection::gproj); }
TEST(Bias, beta_s8) { expect_that_beta_cures_delta_on_s8(kCpu); }
TEST(Bias, beta_of_ties) {
  for (const char* backend : {"cpu", "reference"})
    for (const Precision precision : {Precision::bf16, Precision::f16})
      expect_that_beta_moves_ties_as_stated(Tested{backend}, precision);
}

}  // namespace
}  // namespace octet::test
