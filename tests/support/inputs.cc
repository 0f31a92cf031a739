#include "support/inputs.h"

#include <octet/formats.hpp>

#include <cmath>
#include <initializer_list>
#include <numbers>
#include <random>

namespace octet::test {
namespace {

// Its own normal numbers, because those of the standard library differ between implementations.
class Random {
 public:
  explicit Random(uint64_t seed) : bits_(seed) {}

  double uniform() { return static_cast<double>(bits_() >> 11) * 0x1p-53; }
  double normal() {  // Box and Muller
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(2.0 * std::numbers::pi * uniform());
  }
  std::vector<double> normals(int64_t count) {
    std::vector<double> x(static_cast<std::size_t>(count));
    for (double& value : x) value = normal();
    return x;
  }
  std::vector<double> direction(int64_t dim) {
    std::vector<double> x = normals(dim);
    double square = 0.0;
    for (double value : x) square += value * value;
    for (double& value : x) value /= std::sqrt(square);
    return x;
  }

 private:
  std::mt19937_64 bits_;
};

void round_all(std::vector<double>& x, octet_dtype format) {
  for (double& value : x) value = round_to(format, value);
}

// Adds factor * offset to tokens [first, last).
void add_to_tokens(std::vector<double>& x, const std::vector<double>& offset, double factor, int64_t first, int64_t last) {
  const auto dim = static_cast<int64_t>(offset.size());
  for (int64_t t = first; t < last; ++t)
    for (int64_t c = 0; c < dim; ++c) x[static_cast<std::size_t>(t * dim + c)] += factor * offset[static_cast<std::size_t>(c)];
}

void scale_channel(std::vector<double>& x, int64_t dim, int64_t channel, double factor) {
  for (std::size_t i = static_cast<std::size_t>(channel); i < x.size(); i += static_cast<std::size_t>(dim)) x[i] *= factor;
}

void bias_channels(HeadInput& x, Random& random) {
  std::vector<double> of_k = random.normals(x.dim), of_q = random.normals(x.dim);
  for (double& value : of_k) value *= 2.0;
  for (int64_t i = 0; i < 4; ++i) {
    const auto c = static_cast<std::size_t>((29 * i + 7) % x.dim);
    of_k[c] = i % 2 ? -40.0 : 40.0;
    of_q[c] = i % 2 ? 5.0 : -5.0;
  }
  add_to_tokens(x.k, of_k, 1.0, 0, x.tokens);
  add_to_tokens(x.q, of_q, 1.0, 0, x.tokens);
}

void add_sink(HeadInput& x, Random& random) {
  constexpr int64_t kSinks = 4;
  const std::vector<double> direction = random.direction(x.dim);
  const double length = std::sqrt(10.0 * std::sqrt(static_cast<double>(x.dim)));  // squared, over sqrt(dim): 10 logits
  add_to_tokens(x.q, direction, length, 0, x.tokens);
  add_to_tokens(x.k, direction, length, 0, std::min(kSinks, x.tokens));
  for (int64_t i = 0; i < std::min(kSinks, x.tokens) * x.dim; ++i) x.v[static_cast<std::size_t>(i)] *= 0.05;
}

}  // namespace

HeadInput standard_input(Standard which, int64_t tokens, int64_t dim, uint64_t seed) {
  Random random(seed * 64 + static_cast<uint64_t>(which));
  HeadInput x{.tokens = tokens, .dim = dim};
  for (auto* tensor : {&x.q, &x.k, &x.v, &x.do_}) *tensor = random.normals(tokens * dim);
  switch (which) {
    case Standard::d1: break;
    case Standard::d2: bias_channels(x, random); break;
    case Standard::d3:
      for (auto* tensor : {&x.q, &x.k, &x.v})
        for (double& value : *tensor)
          if (random.uniform() < 1e-3) value += 10.0 * random.normal();
      break;
    case Standard::d4: add_sink(x, random); break;
    case Standard::d5: {
      std::vector<double> offset(static_cast<std::size_t>(dim), 0.0);
      for (int64_t i = 0; i < 8; ++i) offset[static_cast<std::size_t>((13 * i + 3) % dim)] = i % 2 ? 8.0 : -8.0;
      add_to_tokens(x.v, offset, 1.0, 0, tokens);
      break;
    }
    case Standard::d6:
      for (int64_t i = 0; i < 4; ++i) {
        scale_channel(x.k, dim, (29 * i + 7) % dim, 20.0);
        scale_channel(x.q, dim, (29 * i + 7) % dim, 0.5);
      }
      break;
    case Standard::b3: add_to_tokens(x.k, random.direction(dim), 100.0 * std::sqrt(static_cast<double>(dim)), 0, tokens); break;
    case Standard::b5:
      for (int64_t t = 0; t < tokens; ++t) {
        const double size = 1e-4 * std::exp(2.0 * random.normal());
        for (int64_t c = 0; c < dim; ++c) x.do_[static_cast<std::size_t>(t * dim + c)] *= size;
      }
      break;
    case Standard::b6:
      for (double& value : x.q) value *= 4.0;
      break;
  }
  for (auto* tensor : {&x.q, &x.k, &x.v, &x.do_}) round_all(*tensor, OCTET_BF16);
  return x;
}

HeadInput tangent_input(Tangent which, int64_t tokens, int64_t dim, octet_dtype format, uint64_t seed) {
  Random random(seed * 64 + 32 + static_cast<uint64_t>(which));
  HeadInput x{.tokens = tokens, .dim = dim};
  const auto all = {&x.q, &x.k, &x.v, &x.tq, &x.tk, &x.tv};
  for (auto* tensor : all) *tensor = random.normals(tokens * dim);
  const auto bias = [&](std::vector<double>& tensor, double size) {
    std::vector<double> offset(static_cast<std::size_t>(dim), 0.0);
    for (int64_t i = 0; i < 4; ++i) offset[static_cast<std::size_t>(15 * i % dim)] = i % 2 ? -size : size;
    add_to_tokens(tensor, offset, 1.0, 0, tokens);
  };
  const bool everything = which == Tangent::all_biases;
  if (which == Tangent::k_bias || everything) bias(x.k, 20.0);
  if (which == Tangent::tk_bias || everything) bias(x.tk, 20.0);
  if (which == Tangent::v_bias || everything) bias(x.v, 8.0);
  if (which == Tangent::sharp)
    for (double& value : x.q) value *= 4.0;
  for (auto* tensor : all) round_all(*tensor, format);
  return x;
}

std::vector<TiedRow> tied_rows(bool small_ties) {
  const auto index = [](double x) { return static_cast<std::size_t>(x * static_cast<double>(kTiedKeys)); };
  std::vector<TiedRow> rows;
  for (int64_t seed = 0; seed < kTiedSeeds; ++seed) {
    Random random(static_cast<uint64_t>(1000 + 2 * seed + small_ties));
    std::vector<double> v(static_cast<std::size_t>(kTiedKeys * kTiedDim));
    for (double& value : v) value = round_to(kBf16, -(2.0 + 1.99 * random.uniform()));
    for (int64_t r = 0; r < kTiedRows; ++r) {
      TiedRow row{std::vector<double>(static_cast<std::size_t>(kTiedKeys)), v, random.normals(kTiedDim)};
      const double top = round_to(kBf16, 2.0 + 4.0 * random.uniform());
      for (double& logit : row.logits) logit = round_to(kBf16, top - 14.0 - 4.0 * random.uniform());
      const std::size_t first = index(random.uniform()), other = index(random.uniform());
      const std::size_t second = other == first ? (first + 1) % row.logits.size() : other;
      for (std::size_t tied : {first, second}) {
        row.logits[tied] = top;
        if (small_ties)
          for (std::size_t c = 0; c < kTiedDim; ++c) row.v[tied * kTiedDim + c] /= 2.0;
      }
      for (std::size_t c = 0; c < kTiedDim / 2; ++c) row.do_[c] = -std::fabs(row.do_[c]);
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

}  // namespace octet::test
