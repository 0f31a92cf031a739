// The oracle itself: against a formula of its own kind in long double, against finite differences, and against the laws
// that attention obeys. What it does with tensors (strides, masks, groups, packed sequences) is tested through the
// door.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "cpu/reference/attention.h"
#include "cpu/reference/operands.h"

namespace octet::reference {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

std::vector<double> normals(int64_t count, uint64_t seed) {
  std::mt19937_64 bits(seed);
  std::normal_distribution<double> normal;
  std::vector<double> x(static_cast<std::size_t>(count));
  for (double& value : x) value = normal(bits);
  return x;
}

Matrix random_matrix(int64_t rows, int64_t cols, uint64_t seed) {
  Matrix x(rows, cols);
  x.data = normals(rows * cols, seed);
  return x;
}

// 7 queries, 9 keys, a causal edge, one hidden key, one query that sees nothing, an additive bias.
Head masked_head() {
  Head head{.q = random_matrix(7, 8, 1), .k = random_matrix(9, 8, 2), .v = random_matrix(9, 16, 3), .scale = 0.4};
  for (int64_t i = 0; i < 7; ++i) head.keys.push_back({i / 3, i + 2});
  head.keys[3] = {4, 4};
  head.hidden.assign(63, false);
  head.hidden[5 * 9 + 4] = true;
  head.bias = random_matrix(7, 9, 4);
  return head;
}

// sum_j v_j / sum_l exp(s_l - s_j): softmax without a maximum and without a quotient of sums.
Matrix direct(const Head& head) {
  Matrix o(head.q.rows, head.v.cols);
  for (int64_t i = 0; i < o.rows; ++i) {
    std::vector<long double> s(static_cast<std::size_t>(head.k.rows));
    for (int64_t j = 0; j < head.k.rows; ++j) {
      long double product = 0;
      for (int64_t c = 0; c < head.q.cols; ++c) product += static_cast<long double>(head.q[i][c]) * head.k[j][c];
      s[static_cast<std::size_t>(j)] = product * head.scale + (head.bias.rows ? head.bias[i][j] : 0.0);
    }
    for (int64_t j = 0; j < head.k.rows; ++j) {
      if (!head.sees(i, j)) continue;
      long double inverse = 0;
      for (int64_t l = 0; l < head.k.rows; ++l)
        if (head.sees(i, l)) inverse += std::exp(s[static_cast<std::size_t>(l)] - s[static_cast<std::size_t>(j)]);
      for (int64_t c = 0; c < o.cols; ++c) o[i][c] += static_cast<double>(head.v[j][c] / inverse);
    }
  }
  return o;
}

double largest_difference(const Matrix& a, const Matrix& b) {
  double largest = 0.0;
  for (std::size_t i = 0; i < a.data.size(); ++i) largest = std::max(largest, std::fabs(a.data[i] - b.data[i]));
  return largest;
}

double inner(const Matrix& a, const Matrix& b) {
  return dot(a.data.data(), b.data.data(), static_cast<int64_t>(a.data.size()));
}

TEST(Reference, forward_is_the_direct_formula) {
  const Head head = masked_head();
  const Output out = forward(head, Recipe{});
  EXPECT_LT(largest_difference(out.o, direct(head)), 1e-14);
  Recipe small_tiles;
  small_tiles.tile = 2;
  EXPECT_LT(largest_difference(forward(head, small_tiles).o, out.o), 1e-14);
}

TEST(Reference, a_query_without_keys_is_zero) {
  const Head head = masked_head();
  const Output out = forward(head, Recipe{});
  const Gradients g = backward(head, out.o, out.lse, random_matrix(7, 16, 5), Recipe{});
  const JvpOutput t = jvp(head, {random_matrix(7, 8, 6), random_matrix(9, 8, 7), random_matrix(9, 16, 8)}, Recipe{});
  EXPECT_EQ(out.lse[3], -kInf);
  for (int64_t c = 0; c < 16; ++c) {
    EXPECT_EQ(out.o[3][c], 0.0);
    EXPECT_EQ(t.to[3][c], 0.0);
  }
  for (int64_t c = 0; c < 8; ++c) EXPECT_EQ(g.dq[3][c], 0.0);
}

TEST(Reference, gradients_are_finite_differences) {
  Head head = masked_head();
  const Matrix weights = random_matrix(7, 16, 9);
  const Output out = forward(head, Recipe{});
  const Gradients g = backward(head, out.o, out.lse, weights, Recipe{});
  const std::pair<Matrix*, const Matrix*> pairs[] = {{&head.q, &g.dq}, {&head.k, &g.dk}, {&head.v, &g.dv}};
  for (const auto& [x, dx] : pairs)
    for (std::size_t i = 0; i < x->data.size(); ++i) {
      constexpr double kStep = 1e-5;
      const double at = x->data[i];
      x->data[i] = at + kStep;
      const double above = inner(forward(head, Recipe{}).o, weights);
      x->data[i] = at - kStep;
      const double below = inner(forward(head, Recipe{}).o, weights);
      x->data[i] = at;
      EXPECT_NEAR(dx->data[i], (above - below) / (2 * kStep), 1e-8);
    }
}

TEST(Reference, jvp_is_a_finite_difference_and_the_adjoint_of_the_gradients) {
  const Head head = masked_head();
  const Tangents t{random_matrix(7, 8, 6), random_matrix(9, 8, 7), random_matrix(9, 16, 8)};
  Recipe small_tiles;  // so that the mean of the first tile is not that of the row
  small_tiles.tile = 2;
  const JvpOutput out = jvp(head, t, small_tiles);
  const auto moved = [&](double step) {
    Head h = head;
    for (const auto& [x, tx] : {std::pair{&h.q, &t.q}, {&h.k, &t.k}, {&h.v, &t.v}})
      for (std::size_t i = 0; i < x->data.size(); ++i) x->data[i] += step * tx->data[i];
    return forward(h, Recipe{}).o;
  };
  const Matrix above = moved(1e-5), below = moved(-1e-5);
  for (std::size_t i = 0; i < above.data.size(); ++i)
    EXPECT_NEAR(out.to.data[i], (above.data[i] - below.data[i]) / 2e-5, 1e-8);
  EXPECT_LT(largest_difference(out.primal.o, forward(head, Recipe{}).o), 1e-14);

  const Matrix do_ = random_matrix(7, 16, 10);
  const Gradients g = backward(head, out.primal.o, out.primal.lse, do_, Recipe{});
  EXPECT_NEAR(inner(out.to, do_), inner(t.q, g.dq) + inner(t.k, g.dk) + inner(t.v, g.dv), 1e-12);
}

// Without rounding every recipe is attention: smoothing, rotation, folding, projection and recomputation change
// nothing.
TEST(Reference, recipes_without_their_rounding_are_exact) {
  const Head head = masked_head();
  const Output want = forward(head, Recipe{});
  const Matrix do_ = random_matrix(7, 16, 5);
  const Gradients exact = backward(head, want.o, want.lse, do_, Recipe{});
  Recipe r;
  r.logits = {.smooth_k = kAllTokens, .smooth_q = 4, .hadamard = true};
  r.smooth_v = true;
  r.tile = 3;
  r.beta = 2.0;
  r.backward = {
      .logits = {.smooth_k = 2, .smooth_q = 3, .hadamard = true}, .recompute = true, .delta = OCTET_DELTA_FROM_P};
  const Output out = forward(head, r);
  const Gradients g = backward(head, out.o, out.lse, do_, r);
  EXPECT_LT(largest_difference(out.o, want.o), 1e-13);
  for (std::size_t i : {0, 1, 2, 4, 5, 6}) EXPECT_NEAR(out.lse[i], want.lse[i], 1e-13);
  EXPECT_LT(largest_difference(g.dq, exact.dq), 1e-13);
  EXPECT_LT(largest_difference(g.dk, exact.dk), 1e-13);
  EXPECT_LT(largest_difference(g.dv, exact.dv), 1e-13);
}

TEST(Reference, quantizers_keep_groups_apart) {
  Matrix x = random_matrix(130, 16, 11);
  for (int64_t c = 0; c < 16; ++c) x[70][c] *= 1000.0;
  const auto error_of_row = [&](const Quantizer& q, int64_t row) {
    const Matrix y = quantized(x, q);
    double worst = 0.0;
    for (int64_t c = 0; c < 16; ++c) worst = std::max(worst, std::fabs(y[row][c] - x[row][c]));
    return worst;
  };
  EXPECT_LT(error_of_row({OCTET_I8, Group::token}, 71), .02);
  EXPECT_GT(error_of_row({OCTET_I8, Group::block, 64}, 71), .5);
  EXPECT_LT(error_of_row({OCTET_I8, Group::block, 64}, 63), .02);
  EXPECT_GT(error_of_row({OCTET_I8, Group::thread_q}, 78), .5);  // 78 = 70 + 8
  EXPECT_LT(error_of_row({OCTET_I8, Group::thread_q}, 71), .02);
  EXPECT_GT(error_of_row({OCTET_I8, Group::thread_k}, 71), .5);  // (71 mod 8) / 2 = (70 mod 8) / 2
  EXPECT_LT(error_of_row({OCTET_I8, Group::thread_k}, 72), .02);
  EXPECT_LT(error_of_row({OCTET_F16, Group::power_of_two}, 71), 2e-3);
}

}  // namespace
}  // namespace octet::reference
