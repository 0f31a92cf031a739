#include "passes/bar_inputs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <octet/formats.hpp>
#include <random>

#include "support/inputs.h"

namespace octet::test {
namespace {

// Draws that all tensors of one input share.
class Draw {
 public:
  explicit Draw(uint64_t seed) : bits_(seed) {}
  double normal() { return normal_(bits_); }
  double uniform() { return uniform_(bits_); }

 private:
  std::mt19937_64 bits_;
  std::normal_distribution<double> normal_{0.0, 1.0};
  std::uniform_real_distribution<double> uniform_{0.0, 1.0};
};

// One head: rows of `dim` numbers.
struct Head {
  int64_t dim;
  std::vector<double> x;
  template <class F>
  void for_each(const F& f) {
    for (size_t i = 0; i < x.size(); ++i) f(x[i], static_cast<int64_t>(i) / dim, static_cast<int64_t>(i) % dim);
  }
  void draw(Draw& draw) {
    for (double& value : x) value = draw.normal();
  }
};

// Adds `size` and -`size` in turn to `count` channels (step * t + first) mod dim.
void bias_channels(Head& head, int64_t count, int64_t step, int64_t first, double size) {
  for (int64_t t = 0; t < count; ++t)
    head.for_each(
        [&](double& x, int64_t, int64_t c) { x += c == (t * step + first) % head.dim ? (t % 2 ? -size : size) : 0.0; });
}

// Adds `factor` times one random unit vector to the first `rows` rows of each head.
void add_direction(Draw& draw, const std::vector<std::pair<Head*, int64_t>>& heads, double factor) {
  std::vector<double> u(static_cast<size_t>(heads.front().first->dim));
  double square = 0.0;
  for (double& x : u) x = draw.normal(), square += x * x;
  for (const auto& [head, rows] : heads)
    head->for_each([&, rows = rows](double& x, int64_t t, int64_t c) {
      x += t < rows ? factor * u[static_cast<size_t>(c)] / std::sqrt(square) : 0.0;
    });
}

// K: N(0, 2^2) per channel, but 40 and -40 in four; q: N(0, 1), but -5 and 5 in the same.
void bias_all_channels(Draw& draw, Head& q, Head& k) {
  std::vector<double> of_k(static_cast<size_t>(k.dim)), of_q(of_k);
  for (size_t c = 0; c < of_k.size(); ++c) of_k[c] = 2.0 * draw.normal(), of_q[c] = draw.normal();
  for (int64_t t = 0; t < 4; ++t) {
    const auto c = static_cast<size_t>((t * 29 + 7) % k.dim);
    of_k[c] = t % 2 ? -40.0 : 40.0, of_q[c] = t % 2 ? 5.0 : -5.0;
  }
  k.for_each([&](double& x, int64_t, int64_t c) { x += of_k[static_cast<size_t>(c)]; });
  q.for_each([&](double& x, int64_t, int64_t c) { x += of_q[static_cast<size_t>(c)]; });
}

void copy_head(Values& to, int64_t h, const std::vector<double>& from) {
  std::copy(from.begin(), from.end(), to.data.begin() + to.index(0, h, 0, 0));
}

struct HeadInputs {
  Head q, k, v, do_, tq, tk, tv;
};

void make_difficult(const std::string& name, Draw& draw, HeadInputs& in) {
  const int64_t dim = in.q.dim, all = std::numeric_limits<int64_t>::max();
  if (name == "D2" || name == "B2") bias_all_channels(draw, in.q, in.k);
  if (name == "D3")
    for (Head* x : {&in.q, &in.k, &in.v})
      for (double& value : x->x)
        if (draw.uniform() < 1e-3) value += 10.0 * draw.normal();
  if (name == "D4" || name == "B4") {
    add_direction(draw, {{&in.q, all}, {&in.k, 4}},
                  std::sqrt(10.0 * std::sqrt(static_cast<double>(dim))));  // + 10 logits
    in.v.for_each([](double& x, int64_t t, int64_t) { x *= t < 4 ? .05 : 1.0; });
  }
  if (name == "D5") bias_channels(in.v, 8, 13, 3, -8.0);
  if (name == "D6")
    for (int64_t t = 0; t < 4; ++t) {
      const auto scale = [&](Head& head, double by) {
        head.for_each([&](double& x, int64_t, int64_t c) { x *= c == (t * 29 + 7) % dim ? by : 1.0; });
      };
      scale(in.k, 20.0), scale(in.q, .5);
    }
  if (name == "B3") add_direction(draw, {{&in.k, all}}, 100.0 * std::sqrt(static_cast<double>(dim)));
  if (name == "B5") {
    double size = 0.0;
    in.do_.for_each(
        [&](double& x, int64_t, int64_t c) { x *= c ? size : size = 1e-4 * std::exp(2.0 * draw.normal()); });
  }
  if (name == "B6" || name == "J6") in.q.for_each([](double& x, int64_t, int64_t) { x *= 4.0; });
  if (name == "J2" || name == "J5") bias_channels(in.k, 4, 15, 0, 20.0);
  if (name == "J3" || name == "J5") bias_channels(in.tk, 4, 15, 0, 20.0);
  if (name == "J4" || name == "J5") bias_channels(in.v, 4, 15, 0, 8.0);
}

}  // namespace

Inputs bar_inputs(const std::string& name, const Case& c) {
  const int64_t index = name[1] - '1';
  const int64_t seed = name[0] == 'D' ? 100 + 10 * index : name[0] == 'B' ? 500 + 17 * index : 7 + index;
  Inputs in;
  in.q = Values(c.q_shape()), in.k = Values(c.k_shape()), in.v = Values(c.v_shape()), in.do_ = Values(c.o_shape());
  in.tq = in.q, in.tk = in.k, in.tv = in.v;
  for (int64_t h = 0; h < c.heads; ++h) {
    Draw draw(static_cast<uint64_t>(seed + h));
    const auto empty = [&](const Values& x) {
      return Head{x.shape[3], std::vector<double>(static_cast<size_t>(x.shape[2] * x.shape[3]))};
    };
    HeadInputs head{empty(in.q), empty(in.k), empty(in.v), empty(in.do_), empty(in.tq), empty(in.tk), empty(in.tv)};
    std::vector<Head*> drawn = {&head.q, &head.k, &head.v};
    if (name[0] == 'B') drawn.push_back(&head.do_);
    if (name[0] == 'J') drawn.insert(drawn.end(), {&head.tq, &head.tk, &head.tv});
    for (Head* x : drawn) x->draw(draw);
    make_difficult(name, draw, head);
    const auto keep = [&](Values& to, const Head& from) {
      for (int64_t t = 0; t < to.shape[2]; ++t)
        for (int64_t i = 0; i < from.dim; ++i)
          to.at(0, h, t, i) = round_to(OCTET_BF16, from.x[static_cast<size_t>(t * from.dim + i)]);
    };
    keep(in.q, head.q), keep(in.k, head.k), keep(in.v, head.v), keep(in.do_, head.do_);
    keep(in.tq, head.tq), keep(in.tk, head.tk), keep(in.tv, head.tv);
  }
  return in;
}

Case tied_case() {
  return {.name = "tied",
          .heads = kTiedRows,
          .kv_heads = kTiedRows,
          .tokens_q = 1,
          .tokens_k = kTiedKeys,
          .dim = 8,
          .dim_v = kTiedDim,
          .scale = 1.f,
          .dtype = DType::bf16,
          .out_dtype = DType::bf16};
}

std::vector<Inputs> tied_inputs(bool smaller_sink) {
  const Case c = tied_case();
  const std::vector<TiedRow> rows = tied_rows(smaller_sink);
  std::vector<Inputs> all(kTiedSeeds);
  for (size_t s = 0; s < all.size(); ++s) {
    Inputs& in = all[s];
    in.q = Values(c.q_shape()), in.k = Values(c.k_shape()), in.v = Values(c.v_shape()), in.do_ = Values(c.o_shape());
    for (int64_t h = 0; h < c.heads; ++h) {
      const TiedRow& row = rows[s * kTiedRows + static_cast<size_t>(h)];
      in.q.at(0, h, 0, 0) = 1.0;
      for (int64_t j = 0; j < c.tokens_k; ++j) in.k.at(0, h, j, 0) = row.logits[static_cast<size_t>(j)];
      copy_head(in.v, h, row.v), copy_head(in.do_, h, row.do_);
    }
  }
  return all;
}

}  // namespace octet::test
