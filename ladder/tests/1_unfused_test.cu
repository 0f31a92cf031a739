// Each of the three kernels of rung 1 alone.
#include <gtest/gtest.h>

#include "../1_unfused.cu"
#include "device_array.h"

namespace ladder {
namespace {

const Problem kProblem{.batch = 1, .heads = 2, .seq = 37, .dim = 80, .causal = true};

TEST(Unfused, ScoresAreTheProductsAndMinusInfinityWhereMasked) {
  const Problem& p = kProblem;
  const std::vector<float> q = numbers(p.elements(), 1), k = numbers(p.elements(), 2);
  const DeviceArray<float> device_q(q), device_k(k), s(p.rows() * p.seq);
  launch_scores(p, {.q = device_q.get(), .k = device_k.get(), .workspace = s.get()}, nullptr);
  const std::vector<float> found = s.values();
  for (int row = 0; row < p.rows(); ++row) {
    for (int j = 0; j < p.seq; ++j) {
      double sum = 0;
      for (int c = 0; c < p.dim; ++c) {
        sum += static_cast<double>(q[row * p.dim + c]) * k[(row / p.seq * p.seq + j) * p.dim + c];
      }
      if (j > row % p.seq) {
        ASSERT_EQ(found[row * p.seq + j], -INFINITY) << row << " " << j;
      } else {  // dim products of at most 1, each sum rounded once
        ASSERT_NEAR(found[row * p.seq + j], sum / std::sqrt(p.dim), p.dim * p.dim * 0x1p-24) << row << " " << j;
      }
    }
  }
}

TEST(Unfused, SoftmaxNormalisesEveryRow) {
  const Problem& p = kProblem;
  std::vector<float> s = numbers(p.rows() * p.seq, 3);
  for (size_t i = 0; i < s.size(); ++i) s[i] = i % p.seq > i / p.seq % p.seq ? -INFINITY : 200 * s[i];
  const DeviceArray<float> device_s(s);
  launch_softmax(p, {.workspace = device_s.get()}, nullptr);
  const std::vector<float> found = device_s.values();
  for (int row = 0; row < p.rows(); ++row) {
    double largest = -INFINITY, sum = 0;
    for (int j = 0; j < p.seq; ++j) largest = std::max<double>(largest, s[row * p.seq + j]);
    for (int j = 0; j < p.seq; ++j) sum += std::exp(s[row * p.seq + j] - largest);
    for (int j = 0; j < p.seq; ++j) {
      // Scores up to 200 have spacings of 2^-16, which the subtraction keeps exactly; exp and the quotient round.
      ASSERT_NEAR(found[row * p.seq + j], std::exp(s[row * p.seq + j] - largest) / sum, 0x1p-20) << row << " " << j;
    }
  }
}

TEST(Unfused, ProductAveragesTheValues) {
  const Problem& p = kProblem;
  const std::vector<float> weights = numbers(p.rows() * p.seq, 4), v = numbers(p.elements(), 5);
  const DeviceArray<float> device_p(weights), device_v(v), o(p.elements());
  launch_product(p, {.v = device_v.get(), .o = o.get(), .workspace = device_p.get()}, nullptr);
  const std::vector<float> found = o.values();
  for (int row = 0; row < p.rows(); ++row) {
    for (int c = 0; c < p.dim; ++c) {
      double sum = 0;
      for (int j = 0; j < p.seq; ++j) {
        sum += static_cast<double>(weights[row * p.seq + j]) * v[(row / p.seq * p.seq + j) * p.dim + c];
      }
      ASSERT_NEAR(found[row * p.dim + c], sum, p.seq * p.seq * 0x1p-24) << row << " " << c;
    }
  }
}

}  // namespace
}  // namespace ladder
