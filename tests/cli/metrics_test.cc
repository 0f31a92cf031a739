// The figures of octet check and octet study, on numbers small enough to reckon by hand.
#include "metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace octet::cli {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();

Array array(DType dtype, const Shape& shape, const std::vector<double>& values) {
  Array a(dtype, shape);
  for (std::size_t i = 0; i < values.size(); ++i) a.set(static_cast<int64_t>(i), values[i]);
  return a;
}

TEST(Compare, two_heads_by_hand) {
  const Errors e =
      compare(array(DType::f64, {1, 2, 1, 2}, {3, 4, 1, 1}), array(DType::f64, {1, 2, 1, 2}, {3, 5, 1, 3}));
  EXPECT_DOUBLE_EQ(e.rel_l1, 3.0 / 12);
  EXPECT_DOUBLE_EQ(e.rel_l2, std::sqrt(5.0 / 44));
  EXPECT_DOUBLE_EQ(e.worst_head_rel_l2, std::sqrt(4.0 / 10));
  EXPECT_DOUBLE_EQ(e.max_abs, 2);
  EXPECT_DOUBLE_EQ(e.cos, 33 / std::sqrt(27.0 * 44));
}

TEST(Compare, equal_arrays_have_no_error_even_if_zero_or_empty) {
  for (const Shape& shape : {Shape{1, 1, 1, 3}, Shape{1, 1, 0, 3}}) {
    const Array zeros(DType::f32, shape);
    const Errors e = compare(zeros, zeros);
    EXPECT_EQ(e.rel_l2, 0);
    EXPECT_EQ(e.worst_head_rel_l2, 0);
    EXPECT_EQ(e.cos, 1);
  }
}

TEST(Compare, an_error_against_zero_is_infinite) {
  const Errors e = compare(array(DType::f32, {1, 1, 1, 1}, {1}), Array(DType::f64, Shape{1, 1, 1, 1}));
  EXPECT_EQ(e.rel_l2, kInf);
}

TEST(Compare, nan_is_counted_and_spoils_the_figures_of_its_head_and_the_whole) {
  const Errors e = compare(array(DType::f32, {1, 3, 1, 1}, {1, kNan, 2}), array(DType::f64, {1, 3, 1, 1}, {1, 1, 1}));
  EXPECT_EQ(e.nan, 1);
  EXPECT_TRUE(std::isnan(e.rel_l2));
  EXPECT_TRUE(std::isnan(e.worst_head_rel_l2));
  EXPECT_TRUE(std::isnan(e.max_abs));
  EXPECT_TRUE(std::isnan(e.cos));
}

TEST(Compare, equal_infinities_agree) {
  const Errors e = compare(array(DType::f32, {1, 1, 2, 1}, {-kInf, 2}), array(DType::f64, {1, 1, 2, 1}, {-kInf, 2}));
  EXPECT_EQ(e.rel_l2, 0);
  EXPECT_EQ(e.saturated, 0);
}

TEST(Compare, clamping_and_overflow_are_counted_but_not_rounding_to_the_largest_number) {
  EXPECT_EQ(
      compare(array(DType::e4m3, {1, 1, 1, 3}, {448, 448, -448}), array(DType::f64, {1, 1, 1, 3}, {440, 1000, -500}))
          .saturated,
      2);
  EXPECT_EQ(compare(array(DType::f16, {1, 1, 1, 2}, {kInf, 1}), array(DType::f64, {1, 1, 1, 2}, {70000, 1})).saturated,
            1);
  EXPECT_EQ(compare(array(DType::e4m3, {1, 1, 1, 1}, {448}), array(DType::f64, {1, 1, 1, 1}, {448})).saturated, 0);
}

TEST(Bias, counts_outward_in_units_of_the_last_place) {
  Bias bias;  // bf16: a unit of 2^-7 in [1, 2), 2^-6 in [2, 4)
  bias.add_output(1.5 + 0x1p-7, 1.5, 7);
  bias.add_output(-(2.5 + 0x1p-6), -2.5, 7);
  bias.add_output(1.5, 1.5, 7);
  bias.add_output(0.25, 0, 7);  // no binade: not counted
  EXPECT_DOUBLE_EQ(bias.outward_ulps(), 2.0 / 3);
  EXPECT_NEAR(bias.t(), (2.0 / 3) / std::sqrt((2.0 / 9) / 3), 1e-12);
}

TEST(Bias, kappa_tells_coherent_errors_from_random_ones) {
  Bias coherent, random;
  for (int i = 0; i < 8; ++i) coherent.add_delta(1.5, 1), random.add_delta(i % 2 ? 1.5 : 0.5, 1);
  EXPECT_DOUBLE_EQ(coherent.kappa(), 1);
  EXPECT_DOUBLE_EQ(random.kappa(), 0);
  EXPECT_DOUBLE_EQ(Bias().kappa(), 0);
}

}  // namespace
}  // namespace octet::cli
