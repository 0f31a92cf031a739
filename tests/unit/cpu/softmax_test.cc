// The softmax of a row, step after step, against float64: every format of P, rows of all lengths, and logits that
// float32 barely holds.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "primitives.h"

namespace octet::cpu::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();

// The relative error of exp2 that softmax/exp2.h states for a degree.
struct Degree {
  int degree;
  double error;
};

TEST(Softmax, exp2_errs_by_no_more_than_its_degree_allows) {
  for (const auto& [degree, error] : {Degree{3, 1.1e-4}, Degree{4, 3.5e-6}, Degree{6, 1.2e-7}}) {
    std::vector<float> x, y;
    for (int i = 0; i < 1 << 18; ++i) x.push_back(-126.f + 253.9f * static_cast<float>(i) / (1 << 18));
    for (int i = 0; i < 1 << 14; ++i) x.push_back(-1.f + static_cast<float>(i) / (1 << 13));
    y.resize(x.size());
    primitives().exp2(degree, x.data(), y.data(), static_cast<int64_t>(x.size()));
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double want = std::exp2(static_cast<double>(x[i]));
      ASSERT_LE(std::fabs(y[i] / want - 1), error) << "degree " << degree << " of " << x[i];
    }
    std::vector<float> special{0.f, -0.f, -200.f, -1e30f, -kInf, 130.f, 1e30f, kInf, kNaN};
    special.resize(16);
    std::vector<float> got(16);
    primitives().exp2(degree, special.data(), got.data(), 16);
    const std::vector<float> want{1.f, 1.f, 0.f, 0.f, 0.f, kInf, kInf, kInf};
    for (std::size_t i = 0; i < want.size(); ++i)
      EXPECT_EQ(got[i], want[i]) << "degree " << degree << " of " << special[i];
    EXPECT_TRUE(std::isnan(got[8])) << "degree " << degree;
  }
}

struct Format {
  PFormat format;
  const char* name;
  double relative;  // half the distance of its numbers
  double absolute;  // of the smallest ones, P being at most 1
};
constexpr Format kFormats[] = {{PFormat::exact, "f32", 0x1p-24, 0x1p-126},
                               {PFormat::bf16, "bf16", 0x1p-8, 0x1p-126},
                               {PFormat::f16, "f16", 0x1p-11, 0x1p-25 / 64},
                               {PFormat::e4m3, "e4m3", 0x1p-4, 0x1p-10 / 256},
                               {PFormat::u8, "u8", 0, 0.5 / 255}};

// Returns by how much the exponent of P errs: x - m is rounded, or x and m times log2(e) are, and exp2 has its own
// error.
double exponent_error(float x, float m) {
  return 4 * 0x1p-24 * (std::fabs(static_cast<double>(x)) + std::fabs(static_cast<double>(m)));
}

double exp2_error(PFormat format) { return format == PFormat::u8 ? 1.1e-4 : format == PFormat::exact ? 2e-7 : 3.5e-6; }

void expect_softmax(const std::vector<float>& logits, int64_t first, int64_t last, const std::string& what) {
  const auto keys = static_cast<int64_t>(logits.size());
  double m = -kInf, l = 0;
  for (int64_t j = first; j < last; ++j) m = std::max<double>(m, logits[j]);
  std::vector<double> want(keys, 0.0);
  for (int64_t j = first; j < last && m > -kInf; ++j) l += want[j] = std::exp(logits[j] - m);
  for (double& p : want) p = l > 0 ? p / l : 0;
  for (const Format& f : kFormats)
    for (const bool stale_max : {false, true}) {
      SCOPED_TRACE(what + ", " + f.name + (stale_max ? ", stale maximum" : "") + ", keys [" + std::to_string(first) +
                   ", " + std::to_string(last) + ") of " + std::to_string(keys));
      std::vector<double> p(keys, -1.0);
      SoftmaxRow row{f.format, logits.data(), keys, first, last, stale_max, p.data()};
      primitives().softmax_row(row);
      double sum_error = 0;  // relative, of the row sum
      std::vector<double> bound(keys, f.absolute / std::max(l, 1.0));
      sum_error += f.format == PFormat::u8 ? 0 : f.absolute * static_cast<double>(keys) / std::max(l, 1.0);
      for (int64_t j = first; j < last; ++j) {
        if (want[j] == 0) continue;
        const double relative = f.relative + exp2_error(f.format) + exponent_error(logits[j], static_cast<float>(m));
        bound[j] += relative * want[j];
        sum_error += relative * want[j];
      }
      sum_error += 64 * 0x1p-24;  // of its additions
      for (int64_t j = 0; j < keys; ++j)
        ASSERT_LE(std::fabs(p[j] - want[j]), 1.01 * (bound[j] + sum_error * want[j]))
            << "key " << j << ": " << p[j] << ", not " << want[j];
      if (l > 0)
        ASSERT_LE(std::fabs(row.lse - (m + std::log(l))),
                  1.01 * (sum_error + 0x1p-23 * std::fabs(m) + exponent_error(0, static_cast<float>(m))));
      else
        ASSERT_EQ(row.lse, -kInf);
    }
}

std::vector<float> normal(int64_t n, float deviation, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> numbers(0.f, deviation);
  std::vector<float> x(n);
  for (float& one : x) one = numbers(random);
  return x;
}

TEST(Softmax, rows_of_every_length_are_those_of_float64) {
  for (const int64_t keys : {1, 2, 63, 64, 65, 127, 192, 255, 256, 257, 320, 512, 700})
    for (const float deviation : {0.1f, 3.f, 30.f})
      expect_softmax(normal(keys, deviation), 0, keys, "deviation " + std::to_string(deviation));
}

TEST(Softmax, keys_that_a_row_does_not_see_have_no_part) {
  std::vector<float> logits = normal(600, 2.f);
  for (const auto& [first, last] :
       {std::pair{0, 1}, {5, 70}, {63, 65}, {200, 600}, {256, 512}, {300, 301}, {599, 600}}) {
    std::vector<float> x = logits;
    for (int64_t j = 0; j < 600; ++j)
      if (j < first || j >= last) x[j] = j % 3 ? kNaN : 1e30f;
    expect_softmax(x, first, last, "hidden NaN");
  }
  expect_softmax(logits, 300, 300, "no key");
}

TEST(Softmax, extreme_logits_are_those_of_float64) {
  expect_softmax(std::vector<float>(600, 0.f), 0, 600, "zeros");
  expect_softmax(std::vector<float>(600, -1e30f), 0, 600, "equal and very low");
  expect_softmax(std::vector<float>(600, 1e30f), 0, 600, "equal and very high");
  expect_softmax(std::vector<float>(600, std::numeric_limits<float>::lowest()), 0, 600, "the lowest");
  for (const float step : {1.f, 0.01f}) {
    std::vector<float> rising(700), falling(700);
    for (int j = 0; j < 700; ++j) rising[j] = step * static_cast<float>(j), falling[j] = -rising[j];
    expect_softmax(rising, 0, 700, "rising");
    expect_softmax(falling, 0, 700, "falling");
  }
  for (const int64_t at : {0, 100, 255, 256, 599}) {
    std::vector<float> one = normal(600, 1.f);
    one[at] = 80.f;
    expect_softmax(one, 0, 600, "one above all others");
    one[at] = 3e38f;
    expect_softmax(one, 0, 600, "one that is huge");
    one.assign(600, -kInf);
    one[at] = -5.f;
    expect_softmax(one, 0, 600, "one that is finite");
  }
  expect_softmax(std::vector<float>(600, -kInf), 0, 600, "all masked");
}

TEST(Softmax, a_logit_that_is_no_number_makes_its_row_one) {
  for (const float bad : {kNaN, kInf})
    for (const int64_t at : {0, 64, 300})
      for (const Format& f : kFormats)
        for (const bool stale_max : {false, true}) {
          std::vector<float> x = normal(400, 1.f);
          x[at] = bad;
          std::vector<double> p(400);
          SoftmaxRow row{f.format, x.data(), 400, 0, 400, stale_max, p.data()};
          primitives().softmax_row(row);
          EXPECT_TRUE(std::isnan(row.lse)) << f.name << ", " << bad << " at " << at;
        }
}

}  // namespace
}  // namespace octet::cpu::test
