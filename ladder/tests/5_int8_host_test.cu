// The arithmetic of rung 5 that needs no GPU: levels, and zero points whose corrections are exact in int32.
#include <gtest/gtest.h>

#include <cstring>

#include "../5_int8.cu"
#include "device_array.h"

namespace ladder {
namespace {

// sum (q - zq)(k - zk) in int64 against the int32 sum that starts at start_of, with what its comment adds back.
void expect_exact(const std::vector<int>& q, const std::vector<int>& k, int q_zero, int k_zero) {
  const int dim = static_cast<int>(q.size());
  int64_t expected = 0;
  int sum_q = 0, sum_k = 0;
  for (int c = 0; c < dim; ++c) {
    expected += (int64_t{q[c]} - q_zero) * (int64_t{k[c]} - k_zero);
    sum_q += q[c], sum_k += k[c];
  }
  int found = start_of(q_zero, sum_k);
  for (int c = 0; c < dim; ++c) found += q[c] * k[c];
  const int64_t of_row = int64_t{dim} * q_zero * k_zero - int64_t{k_zero} * sum_q;  // the same for all keys
  ASSERT_EQ(int64_t{found} - kBias + of_row, expected);
  // The sum taken as a float is the bias plus the sum, and order is the same.
  float as_float;
  std::memcpy(&as_float, &found, sizeof as_float);
  ASSERT_EQ(static_cast<double>(as_float), 12582912.0 + (found - kBias));
}

TEST(Int8, ZeroPointCorrectionsAreExact) {
  const std::vector<int> ends = {-128, -127, -1, 0, 1, 127};
  for (int dim : {64, 128}) {
    for (int a : ends) {
      for (int b : ends) {
        for (int q_zero : ends) {
          for (int k_zero : ends) expect_exact(std::vector<int>(dim, a), std::vector<int>(dim, b), q_zero, k_zero);
        }
      }
    }
    for (unsigned seed = 0; seed < 1000; ++seed) {
      const std::vector<float> x = numbers(2 * dim + 2, seed + 1);
      std::vector<int> codes;
      for (float each : x) codes.push_back(static_cast<int>(std::floor(127.5f * each)));
      expect_exact({codes.begin(), codes.begin() + dim}, {codes.begin() + dim, codes.end() - 2}, codes[2 * dim],
                   codes[2 * dim + 1]);
    }
  }
}

TEST(Int8, LevelsAreWithinHalfAScaleAndHaveZero) {
  for (const auto& [low, high] : {std::pair(-3.0f, 1.0f), {-1.0f, 0.0f}, {0.0f, 5.0f}, {-0.25f, 70.0f}, {0.0f, 0.0f}}) {
    const Levels levels = levels_of(low, high);
    EXPECT_EQ(levels.code(0), levels.zero);
    EXPECT_GE(levels.zero, -128);
    EXPECT_LE(levels.zero, 127);
    for (int i = 0; i <= 1000; ++i) {
      const float x = low + (high - low) * static_cast<float>(i) / 1000;
      const double rounded = static_cast<double>(levels.scale) * (levels.code(x) - levels.zero);
      // Half a scale, and at the ends half a scale more, as the zero point was rounded to a whole number.
      EXPECT_NEAR(rounded, x, levels.scale * (i > 4 && i < 996 ? 0.5001 : 1.0001)) << low << " " << high;
    }
  }
}

}  // namespace
}  // namespace ladder
