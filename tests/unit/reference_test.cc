// The oracle itself: against a formula of its own kind in long double, against finite differences, and against the laws
// that attention obeys. What it does with tensors (strides, masks, groups, packed sequences) is tested through the
// C ABI.
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

constexpr double kSinks[] = {-kInf, -2.0, .7, 9.0};

double inner(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (std::isfinite(a[i])) sum += a[i] * b[i];
  return sum;
}

TEST(Reference, gradients_are_finite_differences) {
  for (double sink : kSinks) {
    Head head = masked_head();
    head.sink = sink;
    const Matrix factors = random_matrix(7, 16, 9);
    const std::vector<double> lse_factors = normals(7, 12);
    const auto loss = [&] {
      const Output out = forward(head, Recipe{});
      return inner(out.o, factors) + inner(out.lse, lse_factors);
    };
    const Output out = forward(head, Recipe{});
    const Gradients g = backward(head, out.o, out.lse, factors, Recipe{}, lse_factors);
    const auto expect_derivative = [&](double& x, double dx) {
      constexpr double kStep = 1e-5;
      const double at = x;
      x = at + kStep;
      const double above = loss();
      x = at - kStep;
      const double below = loss();
      x = at;
      EXPECT_NEAR(dx, (above - below) / (2 * kStep), 1e-8) << sink;
    };
    const std::pair<Matrix*, const Matrix*> pairs[] = {{&head.q, &g.dq}, {&head.k, &g.dk}, {&head.v, &g.dv}};
    for (const auto& [x, dx] : pairs)
      for (std::size_t i = 0; i < x->data.size(); ++i) expect_derivative(x->data[i], dx->data[i]);
    if (sink == -kInf)
      EXPECT_EQ(g.dsink, 0.0);
    else
      expect_derivative(head.sink, g.dsink);
  }
}

TEST(Reference, jvp_is_a_finite_difference_and_the_adjoint_of_the_gradients) {
  for (double sink : kSinks) {
    Head head = masked_head();
    head.sink = sink;
    const Tangents t{random_matrix(7, 8, 6), random_matrix(9, 8, 7), random_matrix(9, 16, 8), 1.3};
    Recipe small_tiles;  // so that the mean of the first tile is not that of the row
    small_tiles.tile = 2;
    const JvpOutput out = jvp(head, t, small_tiles);
    const auto moved = [&](double step) {
      Head h = head;
      for (const auto& [x, tx] : {std::pair{&h.q, &t.q}, {&h.k, &t.k}, {&h.v, &t.v}})
        for (std::size_t i = 0; i < x->data.size(); ++i) x->data[i] += step * tx->data[i];
      h.sink += step * t.sink;
      return forward(h, Recipe{});
    };
    const Output above = moved(1e-5), below = moved(-1e-5);
    for (std::size_t i = 0; i < above.o.data.size(); ++i)
      EXPECT_NEAR(out.to.data[i], (above.o.data[i] - below.o.data[i]) / 2e-5, 1e-8) << sink;
    for (std::size_t i = 0; i < 7; ++i) {
      const double want = std::isfinite(above.lse[i]) ? (above.lse[i] - below.lse[i]) / 2e-5 : 0.0;
      EXPECT_NEAR(out.tlse[i], want, 1e-8) << sink;
    }
    const Output primal = forward(head, Recipe{});
    EXPECT_LT(largest_difference(out.primal.o, primal.o), 1e-14);
    for (std::size_t i = 0; i < 7; ++i)
      EXPECT_TRUE(out.primal.lse[i] == primal.lse[i] || std::fabs(out.primal.lse[i] - primal.lse[i]) < 1e-14);

    const Matrix do_ = random_matrix(7, 16, 10);
    const std::vector<double> dlse = normals(7, 12);
    const Gradients g = backward(head, out.primal.o, out.primal.lse, do_, Recipe{}, dlse);
    EXPECT_NEAR(inner(out.to, do_) + inner(out.tlse, dlse),
                inner(t.q, g.dq) + inner(t.k, g.dk) + inner(t.v, g.dv) + t.sink * g.dsink, 1e-12);
  }
}

// A sink is one more key whose logit is the same for every query and whose value is 0: here its key has a channel of
// its own, in which every query has a one. What that key gets there is the gradient of the sink.
TEST(Reference, a_sink_is_a_key_without_a_value) {
  Head head = masked_head(), longer = head;
  head.sink = .7;
  longer.q = Matrix(7, 16), longer.k = Matrix(10, 16), longer.v = Matrix(10, 16), longer.bias = Matrix(7, 10);
  longer.hidden.assign(70, true);
  for (int64_t i = 0; i < 7; ++i) {
    std::copy(head.q[i], head.q[i] + 8, longer.q[i]), longer.q[i][8] = 1.0;
    longer.keys[static_cast<std::size_t>(i)] = {0, 10};
    longer.hidden[static_cast<std::size_t>(i * 10 + 9)] = false;
    for (int64_t j = 0; j < 9; ++j) {
      if (head.sees(i, j)) longer.hidden[static_cast<std::size_t>(i * 10 + j)] = false;
      longer.bias[i][j] = head.bias[i][j];
    }
  }
  for (int64_t j = 0; j < 9; ++j)
    std::copy(head.k[j], head.k[j] + 8, longer.k[j]), std::copy(head.v[j], head.v[j] + 16, longer.v[j]);
  longer.k[9][8] = head.sink / head.scale;

  const Output out = forward(head, Recipe{}), want = forward(longer, Recipe{});
  EXPECT_LT(largest_difference(out.o, want.o), 1e-14);
  for (std::size_t i = 0; i < 7; ++i) EXPECT_NEAR(out.lse[i], want.lse[i], 1e-14);
  EXPECT_EQ(out.lse[3], .7);  // sees nothing else
  const Matrix do_ = random_matrix(7, 16, 5);
  const std::vector<double> dlse = normals(7, 12);
  for (octet_delta delta : {OCTET_DELTA_FROM_O, OCTET_DELTA_FROM_P}) {
    Recipe r;
    r.backward.delta = delta, r.backward.recompute = delta == OCTET_DELTA_FROM_P;
    const Gradients g = backward(head, out.o, out.lse, do_, r, dlse);
    const Gradients w = backward(longer, want.o, want.lse, do_, r, dlse);
    for (int64_t i = 0; i < 7; ++i)
      for (int64_t c = 0; c < 8; ++c) EXPECT_NEAR(g.dq[i][c], w.dq[i][c], 1e-13);
    for (int64_t j = 0; j < 9; ++j)
      for (int64_t c = 0; c < 8; ++c) EXPECT_NEAR(g.dk[j][c], w.dk[j][c], 1e-13);
    for (int64_t z = 0; z < 9 * 16; ++z)
      EXPECT_NEAR(g.dv.data[static_cast<std::size_t>(z)], w.dv.data[static_cast<std::size_t>(z)], 1e-13);
    EXPECT_NEAR(g.dsink, w.dk[9][8] / head.scale, 1e-13);
  }
}

TEST(Reference, a_sink_that_is_not_a_number_makes_its_rows_nan) {
  for (double sink : {kInf, std::numeric_limits<double>::quiet_NaN()}) {
    Head head = masked_head();
    head.sink = sink;
    const Output out = forward(head, Recipe{});
    for (std::size_t i = 0; i < 7; ++i) EXPECT_TRUE(std::isnan(out.lse[i]));
    for (int64_t i : {0, 1, 2, 4, 5, 6}) EXPECT_TRUE(std::isnan(out.o[i][0]));
    EXPECT_TRUE(std::isnan(backward(head, out.o, out.lse, random_matrix(7, 16, 5), Recipe{}).dsink));
  }
}

// ds may be as large as dlse, or no larger than a tiny one: the power of two of f16 follows it.
TEST(Reference, scaled_ds_follows_dlse) {
  const Head head = masked_head();
  const Output out = forward(head, Recipe{});
  for (const double size : {1e-30, 1e-6, 1e6, 1e30}) {
    std::vector<double> dlse = normals(7, 12);
    for (double& x : dlse) x *= size;
    const Matrix none(7, 16);
    const Gradients want = backward(head, out.o, out.lse, none, Recipe{}, dlse);
    const Gradients got = backward(head, out.o, out.lse, none, f16_compute(OCTET_F16), dlse);
    for (const auto& [g, w] : {std::pair{&got.dq, &want.dq}, {&got.dk, &want.dk}}) {
      const double norm = std::sqrt(inner(*w, *w));
      Matrix error = *g;
      for (std::size_t z = 0; z < error.data.size(); ++z) error.data[z] -= w->data[z];
      EXPECT_LT(std::sqrt(inner(error, error)), 1e-3 * norm) << size;
    }
  }
}

// Without rounding every recipe is attention: smoothing, rotation, folding, operands of their own, projection and
// recomputation change nothing.
TEST(Reference, recipes_without_their_rounding_are_exact) {
  for (double sink : kSinks) {
    Head head = masked_head();
    head.sink = sink;
    const Output want = forward(head, Recipe{});
    const Matrix do_ = random_matrix(7, 16, 5);
    const std::vector<double> dlse = normals(7, 12);
    const Gradients exact = backward(head, want.o, want.lse, do_, Recipe{}, dlse);
    const auto expect_exact = [&](const Recipe& r, const Output& out, double tolerance) {
      const Gradients g = backward(head, out.o, out.lse, do_, r, dlse);
      EXPECT_LT(largest_difference(g.dq, exact.dq), tolerance) << sink;
      EXPECT_LT(largest_difference(g.dk, exact.dk), tolerance) << sink;
      EXPECT_LT(largest_difference(g.dv, exact.dv), tolerance) << sink;
      EXPECT_NEAR(g.dsink, exact.dsink, tolerance) << sink;
    };
    Recipe r;
    r.logits = {.smooth_k = kAllTokens, .smooth_q = 4, .hadamard = true};
    r.smooth_v = true;
    r.tile = 3;
    r.beta = 2.0;
    r.backward = {
        .logits = {.smooth_k = 2, .smooth_q = 3, .hadamard = true}, .recompute = true, .delta = OCTET_DELTA_FROM_P};
    const Output out = forward(head, r);
    EXPECT_LT(largest_difference(out.o, want.o), 1e-13);
    for (std::size_t i : {0, 1, 2, 4, 5, 6}) EXPECT_NEAR(out.lse[i], want.lse[i], 1e-13);
    expect_exact(r, out, 1e-13);
    r.backward.logits.smooth_k = kAllTokens, r.backward.logits.smooth_q = 0;
    expect_exact(r, out, 1e-13);
    r.backward.smooth_v = true;
    r.backward.q_dk = Quantizer{};
    expect_exact(r, out, 1e-13);
    r.backward.smooth_dq = Quantizer{};
    expect_exact(r, out, 1e-13);
    r.backward.logits.smooth_k = 2;
    expect_exact(r, out, 1e-13);
    Recipe smooth_dq;
    smooth_dq.backward.smooth_dq = Quantizer{};
    expect_exact(smooth_dq, want, 1e-13);
    Recipe projected;  // by sums of p that are rounded to f32, and ds that is not
    projected.backward.gproj = OCTET_F32;
    expect_exact(projected, want, 1e-6);
  }
}

// The projection takes out again what a wrong delta puts into every logit's gradient, the sink's included.
TEST(Reference, projection_corrects_delta_with_a_sink_and_dlse) {
  Head head = masked_head();
  head.sink = .7;
  const Output out = forward(head, Recipe{});
  const Matrix do_ = random_matrix(7, 16, 5);
  const std::vector<double> dlse = normals(7, 12);
  const Gradients exact = backward(head, out.o, out.lse, do_, Recipe{}, dlse);
  Matrix o = out.o;
  for (double& x : o.data) x *= 1.25;
  Recipe r;
  EXPECT_GT(std::fabs(backward(head, o, out.lse, do_, r, dlse).dsink - exact.dsink), .01);
  r.backward.gproj = OCTET_F32;
  const Gradients g = backward(head, o, out.lse, do_, r, dlse);
  EXPECT_LT(largest_difference(g.dq, exact.dq), 1e-6);
  EXPECT_LT(largest_difference(g.dk, exact.dk), 1e-6);
  EXPECT_NEAR(g.dsink, exact.dsink, 1e-6);
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
