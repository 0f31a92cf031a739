#include "passes/bar_inputs.h"

#include <cmath>
#include <random>

namespace octet::test {
namespace {

// Draws that all tensors of one input share.
class Draw {
 public:
  explicit Draw(uint64_t seed) : bits_(seed) {}
  double normal() { return normal_(bits_); }
  double uniform() { return uniform_(bits_); }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits_() % static_cast<uint64_t>(n)); }

 private:
  std::mt19937_64 bits_;
  std::normal_distribution<double> normal_{0.0, 1.0};
  std::uniform_real_distribution<double> uniform_{0.0, 1.0};
};

// x[b, h, t, c] += shift(h, t, c)
template <class F>
void add(Values& x, const F& shift) {
  for_each(x.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) { x.at(b, h, t, c) += shift(h, t, c); });
}

template <class F>
void multiply(Values& x, const F& factor) {
  for_each(x.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) { x.at(b, h, t, c) *= factor(t, c); });
}

bool heavy_channel(int64_t c, int64_t dim, int64_t* sign = nullptr) {
  for (int64_t t = 0; t < 4; ++t)
    if (c == (t * 29 + 7) % dim) {
      if (sign) *sign = t % 2 ? 1 : -1;
      return true;
    }
  return false;
}

// N(0, deviation^2) per channel, but `heavy` with alternating signs in four of them.
std::vector<double> channel_bias(Draw& draw, int64_t dim, double deviation, double heavy) {
  std::vector<double> bias(static_cast<size_t>(dim));
  for (int64_t c = 0; c < dim; ++c) {
    int64_t sign = 1;
    bias[static_cast<size_t>(c)] = deviation * draw.normal();
    if (heavy_channel(c, dim, &sign)) bias[static_cast<size_t>(c)] = -heavy * static_cast<double>(sign);
  }
  return bias;
}

void add_bias(Values& x, const std::vector<double>& bias) {
  add(x, [&](int64_t, int64_t, int64_t c) { return bias[static_cast<size_t>(c)]; });
}

std::vector<double> unit_vector(Draw& draw, int64_t dim) {
  std::vector<double> u(static_cast<size_t>(dim));
  double square = 0.0;
  for (double& x : u) x = draw.normal(), square += x * x;
  for (double& x : u) x /= std::sqrt(square);
  return u;
}

// `count` channels (step * t + first) mod dim moved by size and -size in turn.
void bias_channels(Values& x, int64_t count, int64_t step, int64_t first, double size) {
  const int64_t dim = x.shape[3];
  for (int64_t t = 0; t < count; ++t)
    add(x, [&](int64_t, int64_t, int64_t c) { return c == (t * step + first) % dim ? (t % 2 ? -size : size) : 0.0; });
}

}  // namespace

Inputs bar_inputs(const std::string& name, const Case& c, uint64_t seed) {
  Case unrounded = c;
  unrounded.dtype = DType::f64;
  Inputs in = draw(unrounded, seed);
  Draw draw(seed + 1000);
  if (name == "D2" || name == "B2") {
    add_bias(in.k, channel_bias(draw, c.dim, 2.0, 40.0));
    add_bias(in.q, channel_bias(draw, c.dim, 1.0, -5.0));
  } else if (name == "D3") {
    for (Values* x : {&in.q, &in.k, &in.v}) add(*x, [&](int64_t, int64_t, int64_t) { return draw.uniform() < 1e-3 ? 10.0 * draw.normal() : 0.0; });
  } else if (name == "D4" || name == "B4") {
    const std::vector<double> u = unit_vector(draw, c.dim);
    const double a = std::sqrt(10.0 * std::sqrt(static_cast<double>(c.dim)));  // + 10 logits
    add(in.q, [&](int64_t, int64_t, int64_t i) { return a * u[static_cast<size_t>(i)]; });
    add(in.k, [&](int64_t, int64_t t, int64_t i) { return t < 4 ? a * u[static_cast<size_t>(i)] : 0.0; });
    multiply(in.v, [](int64_t t, int64_t) { return t < 4 ? .05 : 1.0; });
  } else if (name == "D5") {
    bias_channels(in.v, 8, 13, 3, -8.0);
  } else if (name == "D6") {
    multiply(in.k, [&](int64_t, int64_t i) { return heavy_channel(i, c.dim) ? 20.0 : 1.0; });
    multiply(in.q, [&](int64_t, int64_t i) { return heavy_channel(i, c.dim) ? .5 : 1.0; });
  } else if (name == "B3") {
    const std::vector<double> u = unit_vector(draw, c.dim);
    const double offset = 100.0 * std::sqrt(static_cast<double>(c.dim));
    add(in.k, [&](int64_t, int64_t, int64_t i) { return offset * u[static_cast<size_t>(i)]; });
  } else if (name == "B5") {
    std::vector<double> size(static_cast<size_t>(c.tokens_q));
    for (double& x : size) x = 1e-4 * std::exp(2.0 * draw.normal());
    multiply(in.do_, [&](int64_t t, int64_t) { return size[static_cast<size_t>(t)]; });
  } else if (name == "B6" || name == "J6") {
    multiply(in.q, [](int64_t, int64_t) { return 4.0; });
  }
  if (name == "J2" || name == "J5") bias_channels(in.k, 4, 15, 0, 20.0);
  if (name == "J3" || name == "J5") bias_channels(in.tk, 4, 15, 0, 20.0);
  if (name == "J4" || name == "J5") bias_channels(in.v, 4, 15, 0, 8.0);
  for (Values Inputs::* x : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::do_, &Inputs::tq, &Inputs::tk, &Inputs::tv}) in.*x = rounded(in.*x, DType::bf16);
  return in;
}

Case tied_case() {
  return {.name = "tied", .heads = 64, .kv_heads = 64, .tokens_q = 1, .tokens_k = 1024, .dim = 8, .dim_v = 16, .scale = 1.f,
          .dtype = DType::bf16, .out_dtype = DType::bf16};
}

Inputs tied_inputs(bool smaller_sink, const Case& c, uint64_t seed) {
  Draw draw(seed);
  Inputs in = test::draw(c, seed);
  in.q = Values(c.q_shape()), in.k = Values(c.k_shape());
  for (int64_t h = 0; h < c.heads; ++h) {
    in.q.at(0, h, 0, 0) = 1.0;
    const double top = rounded(Values({1, 1, 1, 1}, 2.0 + 4.0 * draw.uniform()), DType::bf16).data[0];
    const int64_t first = draw.below(c.tokens_k), second = (first + 1 + draw.below(c.tokens_k - 1)) % c.tokens_k;
    for (int64_t j = 0; j < c.tokens_k; ++j) {
      const bool tied = j == first || j == second;
      in.k.at(0, h, j, 0) = tied ? top : top - 14.0 - 4.0 * draw.uniform();
      for (int64_t i = 0; i < c.dim_v; ++i) in.v.at(0, h, j, i) = -(2.0 + 1.99 * draw.uniform()) / (tied && smaller_sink ? 2.0 : 1.0);
    }
    for (int64_t i = 0; i < c.dim_v / 2; ++i) in.do_.at(0, h, 0, i) = -std::fabs(in.do_.at(0, h, 0, i));
  }
  for (Values Inputs::* x : {&Inputs::k, &Inputs::v}) in.*x = rounded(in.*x, DType::bf16);
  return in;
}

}  // namespace octet::test
