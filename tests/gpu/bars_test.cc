// The GPU against the bars that the CPU is held to: standard inputs, real activations, and the bias of delta.
#include <gtest/gtest.h>

#include "gpu/place.h"
#include "passes/bias.h"
#include "passes/real.h"

namespace octet::test {
namespace {

const Tested kGpu{gpu_backend(), [] { return std::make_unique<GpuPlace>(); }};
const Tested kGpuDeterministic{gpu_backend(), kGpu.place, true};

TEST(GpuBars, forward) {
  for (DType out : {DType::f32, DType::bf16}) {
    const ForwardBar bar = bf16_forward_bar(out);
    SCOPED_TRACE(bar.row);
    expect_forward_bar(kGpu, bar);
  }
}

// Adds what Hopper's sums of e4m3 products lose where v has an offset (D5): each of up to 1024 numbers cuts the sum so
// far, half of the last on average, off by 2^-15 to 2^-14 of itself, and so does the sum l.
ForwardBar with_sums_of_this_gpu(ForwardBar bar) {
  if (!tests_sm80()) bar.inputs.at("D5").relative_l2 += 1024 / 2 * (0x1p-14 - 0x1p-15);
  return bar;
}

TEST(GpuBars, forward_int8) { expect_forward_bar(kGpu, int8_forward_bar()); }

TEST(GpuBars, forward_int8_f16) { expect_forward_bar(kGpu, int8_f16_forward_bar()); }

TEST(GpuBars, forward_int8_fp8) { expect_forward_bar(kGpu, with_sums_of_this_gpu(int8_fp8_forward_bar())); }

TEST(GpuBars, forward_fp8) { expect_forward_bar(kGpu, with_sums_of_this_gpu(fp8_forward_bar())); }

TEST(GpuBars, forward_fp8_raw) {
  for (DType out : {DType::f32, DType::e4m3}) expect_forward_bar(kGpu, fp8_raw_forward_bar(out));
}

TEST(GpuBars, forward_sagebwd) {
  if (!tests_sm80()) GTEST_SKIP() << "this backend computes no sagebwd";
  expect_forward_bar(kGpu, sagebwd_forward_bar());
}

TEST(GpuBars, forward_int8_f16_smooth_q) {
  if (!tests_sm80()) GTEST_SKIP() << "this backend computes no smooth_q";
  expect_forward_bar(kGpu, int8_f16_smooth_q_forward_bar());
}

TEST(GpuBars, backward) {
  for (BiasCorrection bias_correction : {BiasCorrection::none, BiasCorrection::f16}) {
    const BackwardBar bar = bf16_backward_bar(bias_correction);
    SCOPED_TRACE(bar.row);
    expect_backward_bar(kGpu, bar);
  }
}

// Rows are independent: those of 256 queries have met all keys. An emulated device, which runs sm80, needs seconds for
// these.
TEST(GpuBars, jvp) {
  const int64_t queries = tests_sm80() ? 256 : 1024;
  for (const Precision precision : {Precision::bf16, Precision::f16}) expect_jvp_bars(kGpu, precision, queries);
}

TEST(GpuBars, backward_sagebwd) {
  if (!tests_sm80()) GTEST_SKIP() << "this backend computes no sagebwd";
  expect_backward_bar(kGpu, sagebwd_backward_bar());
}

TEST(GpuBars, backward_deterministic) {
  const BackwardBar bar = bf16_backward_bar(BiasCorrection::f16);
  SCOPED_TRACE(bar.row);
  expect_backward_bar(kGpuDeterministic, bar);
}

TEST(GpuBars, without_bias_correction_a_common_offset_ruins_dq) {
  expect_that_without_bias_correction_a_common_offset_ruins_dq(kGpu);
}

TEST(GpuBars, gradients_err_little_more_than_outputs_round) {
  expect_gradients_to_err_little_more_than_outputs_round(kGpu);
}

TEST(GpuBars, real_activations) { expect_real_bar(kGpu, kRealBf16); }

TEST(GpuBars, real_activations_int8) {
  RealBar forward = kRealInt8;
  forward.dq = forward.dk = forward.dv = 0;
  expect_real_bar(kGpu, forward);
}

// The CPU's bars and what rounding to bf16 adds, as o_residual stands beside an o of 16 bits.
TEST(GpuBars, real_gradients_int8) {
  if (!tests_sm80()) GTEST_SKIP() << "this backend computes no gradients of int8";
  expect_real_bar(kGpu, {"int8", Precision::int8, DType::bf16, 0, .0179, .0188, .0065});
}

TEST(GpuBars, real_gradients_sagebwd) {
  if (!tests_sm80()) GTEST_SKIP() << "this backend computes no sagebwd";
  expect_real_gradients_to_err_as_rounding_costs(kGpu, Precision::sagebwd);
}

TEST(GpuBars, real_activations_int8_f16) { expect_real_bar(kGpu, kRealInt8F16); }

TEST(GpuBars, real_activations_deterministic) { expect_real_bar(kGpuDeterministic, kRealBf16); }

TEST(GpuBars, without_bias_correction_real_activations_miss) {
  expect_that_without_bias_correction_real_dq_misses(kGpu);
}

TEST(GpuBars, delta_s7) { expect_unbiased_delta(kGpu, Tied::s7); }

TEST(GpuBars, delta_s8) { expect_unbiased_delta(kGpu, Tied::s8); }

TEST(GpuBars, dq_s8) { expect_unbiased_dq_on_s8(kGpu, BiasCorrection::f16); }

TEST(GpuBars, beta_s8) { expect_that_beta_cures_delta_on_s8(kGpu); }

TEST(GpuBars, beta_of_ties) {
  for (const Precision precision : {Precision::bf16, Precision::f16})
    expect_that_beta_moves_ties_as_stated(kGpu, precision);
}

}  // namespace
}  // namespace octet::test
