// A number that is not finite reaches the rows that see it on the GPU, and no other: not as 0 inf of a pair that a mask
// hides within a tile.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gpu/place.h"
#include "support/cases.h"
#include "support/seen.h"

namespace octet::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();

struct Shapes {
  const char* name;
  Case c;
  std::vector<int64_t> bad;  // tokens
};
std::vector<Shapes> shapes() {
  const Case plain{.name = "",
                   .heads = 4,
                   .kv_heads = 2,
                   .tokens_q = 330,
                   .tokens_k = 330,
                   .causal = true,
                   .alignment = Alignment::top_left,
                   .dtype = DType::bf16,
                   .out_dtype = DType::bf16};
  std::vector<Shapes> list = {{"top_left", plain, {329}},
                              {"in_the_middle", plain, {97, 200}},
                              {"bottom_right", plain, {150}},
                              {"window", plain, {5, 180, 329}},
                              {"few_keys_in_sight", plain, {10}},
                              {"packed", plain, {40, 200, 279}},
                              {"d128", plain, {200}},
                              {"d128_window_bottom_right", plain, {130, 131}},
                              {"small_heads", plain, {64}},
                              {"d192_128", plain, {250}},
                              {"d256", plain, {163}},
                              {"d256_packed", plain, {40, 200, 279}},
                              {"few_queries", plain, {385, 690}}};
  const auto at = [&](const std::string& name) -> Case& {
    for (Shapes& x : list)
      if (x.name == name) return x.c;
    throw std::logic_error(name);
  };
  at("bottom_right").tokens_q = 250, at("bottom_right").alignment = Alignment::bottom_right;
  at("bottom_right").batch = 2, at("bottom_right").layout = Layout::bthd;
  at("window").causal = false, at("window").window = {{40, 10}};
  // Queries in the middle of a warp's rows see keys, those before and after none.
  Case& few = at("few_keys_in_sight");
  few.causal = false, few.window = {{1, 2}}, few.tokens_k = 12, few.alignment = Alignment::bottom_right;
  for (const char* name : {"packed", "d256_packed"}) {
    at(name).alignment = Alignment::bottom_right;
    at(name).cu_seqlens_q = {0, 70, 71, 71, 330}, at(name).cu_seqlens_k = {0, 60, 90, 130, 330};
  }
  for (const char* name : {"d128", "d128_window_bottom_right"}) at(name).dim = at(name).dim_v = 128;
  at("d128_window_bottom_right").window = {{70, 0}};
  at("d128_window_bottom_right").alignment = Alignment::bottom_right;
  at("d128_window_bottom_right").tokens_q = 280;
  at("small_heads").dim = 40, at("small_heads").dim_v = 72;
  at("d192_128").dim = 192, at("d192_128").dim_v = 128;
  for (const char* name : {"d256", "d256_packed"}) at(name).dim = at(name).dim_v = 256;
  // Some queries see the first one, others the second one.
  Case& short_rows = at("few_queries");
  short_rows.tokens_q = 20, short_rows.tokens_k = 700, short_rows.window = {{300, 0}};
  short_rows.causal = false, short_rows.alignment = Alignment::bottom_right;
  return list;
}

struct Kind {
  Precision precision;
  BiasCorrection bias_correction = BiasCorrection::f16;
  bool deterministic = false;
  DType out = DType::bf16;  // f32 or of 16 bits, as the inputs are
};
std::string name_of(const Kind& kind) {
  return name(kind.precision) + suffix_of(kind.bias_correction) + (kind.deterministic ? "_deterministic" : "") +
         (kind.out == DType::f32 ? "_f32" : "");
}
Case case_of(Case c, const Kind& kind) {
  const DType type = kind.precision == Precision::f16 ? DType::f16 : DType::bf16;
  c.dtype = type, c.out_dtype = kind.out == DType::f32 ? DType::f32 : type;
  return c;
}
Attention attention_for(const Case& c, const Kind& kind) {
  Attention a = attention_of(c, kind.precision, gpu_backend());
  if (kind.precision == Precision::bf16 || kind.precision == Precision::f16) a.bias_correction = kind.bias_correction;
  a.deterministic = kind.deterministic;
  return a;
}
bool has_dims(const Case& c, Precision precision) { return std::max(c.dim, c.dim_v) <= gpu_most_dim(precision); }

// Heads that share the last head of k and v, the one that is spoiled.
int64_t kv_of(const Case& c, int64_t h) { return h / (c.heads / c.kv_heads); }

// The rows of `got`, [batch, head, token, channel], that `spoiled` tells of are not finite in channel 0; of the others
// all numbers are, and they are as near to `want` as `clean` is.
template <class Spoiled>
void expect_reach(const Values& got, const Values& clean, const Values& want, const Spoiled& spoiled, bool shows,
                  const std::string& what) {
  double sum = 0.0, clean_sum = 0.0;
  int64_t count = 0;
  std::string first;
  for_each(want.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
    const double x = got.at(b, h, t, c), y = want.at(b, h, t, c);
    if (spoiled(b, h, t)) {
      if (c == 0 && shows && std::isfinite(x) && first.empty())
        first = "row " + std::to_string(h) + ' ' + std::to_string(t) + " is finite";
      return;
    }
    if (!std::isfinite(x)) {
      if (first.empty())
        first =
            "row " + std::to_string(h) + ' ' + std::to_string(t) + ' ' + std::to_string(c) + " is " + std::to_string(x);
      return;
    }
    const double z = clean.at(b, h, t, c);
    sum += (x - y) * (x - y), clean_sum += (z - y) * (z - y), ++count;
  });
  EXPECT_EQ(first, "") << what;
  if (!count) return;
  const double error = std::sqrt(sum / static_cast<double>(count)),
               plain = std::sqrt(clean_sum / static_cast<double>(count));
  EXPECT_LE(error, 1.5 * plain + 1e-7) << what;
}

Outputs forward(const Case& c, const Inputs& in, const Kind& kind) {
  GpuPlace place;
  return run(c, in, attention_for(c, kind), Pass::forward, nullptr, &place);
}

// Whether query t of head h sees one of the tokens.
bool sees_one(const Case& c, const Inputs& in, const std::vector<int64_t>& tokens, int64_t b, int64_t h, int64_t t) {
  for (const int64_t j : tokens)
    if (kv_of(c, h) == c.kv_heads - 1 && sees(c, in, b, h, t, j)) return true;
  return false;
}

class GpuReach : public testing::TestWithParam<std::tuple<size_t, size_t>> {};
const std::vector<Kind> kForward =
    gpu_kinds<Kind>(Pass::forward, {{Precision::bf16},
                                    {Precision::bf16, BiasCorrection::f16, false, DType::f32},
                                    {Precision::bf16, BiasCorrection::none},
                                    {Precision::bf16, BiasCorrection::beta},
                                    {Precision::f16},
                                    {Precision::f16, BiasCorrection::beta, false, DType::f32},
                                    {Precision::int8_f16},
                                    {Precision::int8},
                                    {Precision::int8_fp8},
                                    {Precision::fp8},
                                    {Precision::fp8_raw, BiasCorrection::f16, false, DType::f32},
                                    {Precision::sagebwd}});

bool v_has_8_bits(Precision precision) { return precision == Precision::int8 || precision == Precision::sagebwd; }

// Some channels of v that are not finite, at tokens that some queries see.
TEST_P(GpuReach, of_v_are_rows_that_see_it) {
  const auto [index, which] = GetParam();
  const Shapes shape = shapes()[index];
  const Kind& kind = kForward[which];
  if (!has_dims(shape.c, kind.precision)) return;
  const Case c = case_of(shape.c, kind);
  const Inputs in = draw(c, index + 1);
  const Outputs want = exact(c, in, Pass::forward), clean = forward(c, in, kind);
  for (const double bad : {kInfinity, -kInfinity, kNaN}) {
    Inputs other = in;
    for (int64_t b = 0; b < c.batch; ++b)
      for (const int64_t j : shape.bad)
        for (const int64_t channel : {int64_t{0}, int64_t{9}, c.dim_v - 1})
          other.v.at(b, c.kv_heads - 1, j, channel) = bad;
    const Outputs got = forward(c, other, kind);
    const auto spoiled = [&](int64_t b, int64_t h, int64_t t) { return sees_one(c, in, shape.bad, b, h, t); };
    // A raw cast to e4m3 saturates.
    const bool shows = kind.precision != Precision::fp8_raw || std::isnan(bad);
    const std::string what = std::to_string(bad);
    expect_reach(got.o, clean.o, want.o, spoiled, shows, what + ", o");
    for_each(c.lse_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t) {
      if (spoiled(b, h, t)) return;
      const double found = got.lse.at(b, h, t, 0), expected = clean.lse.at(b, h, t, 0);
      // At int8 the scales of v tell when the float sums of a row are scaled, which rounds them, and so may what
      // becomes of them: log2 of the sum and its scale, times ln 2, and the mean of k, three roundings in either pass.
      const bool sums_differ = v_has_8_bits(kind.precision) && std::isfinite(expected);
      // A bad token of sagebwd gives its whole block another scale, whose log2 is in each logit: below 16, these round
      // by up to 2^-21 in base 2, in either pass.
      const double of_logits = kind.precision == Precision::sagebwd ? 0x1p-20 * std::log(2.0) : 0.0;
      const double apart = sums_differ ? 0x1p-20 + of_logits + 6 * 0x1p-24 * std::fabs(expected) : 0.0;
      ASSERT_TRUE(found == expected || std::abs(found - expected) <= apart)
          << what << ", lse of " << h << ' ' << t << ": " << found << " instead of " << expected;
    });
    if (!got.o_residual.present() || kind.precision != Precision::bf16) continue;
    // o and what rounding took from it.
    const auto whole = [](const Outputs& x) {
      Values sum = x.o;
      for (size_t i = 0; i < sum.data.size(); ++i) sum.data[i] += x.o_residual.data[i];
      return sum;
    };
    expect_reach(whole(got), whole(clean), want.o, spoiled, shows, what + ", o + o_residual");
  }
}

// Channels of such rows that hold finite values stay as good.
TEST_P(GpuReach, of_a_channel_of_v_is_that_channel) {
  const auto [index, which] = GetParam();
  const Shapes shape = shapes()[index];
  const Kind& kind = kForward[which];
  if (!has_dims(shape.c, kind.precision) || v_has_8_bits(kind.precision)) return;  // v by token
  const Case c = case_of(shape.c, kind);
  const Inputs in = draw(c, index + 1);
  const Outputs want = exact(c, in, Pass::forward), clean = forward(c, in, kind);
  Inputs other = in;
  for (int64_t b = 0; b < c.batch; ++b)
    for (const int64_t j : shape.bad) other.v.at(b, c.kv_heads - 1, j, 9) = kNaN;
  Outputs got = forward(c, other, kind);
  for_each(c.o_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t channel) {
    if (channel == 9 && sees_one(c, in, shape.bad, b, h, t)) got.o.at(b, h, t, channel) = want.o.at(b, h, t, channel);
  });
  expect_reach(
      got.o, clean.o, want.o, [](int64_t, int64_t, int64_t) { return false; }, false, "o");
}

// Keys that are not finite.
TEST_P(GpuReach, of_k_are_rows_that_see_it) {
  const auto [index, which] = GetParam();
  const Shapes shape = shapes()[index];
  const Kind& kind = kForward[which];
  // int8_fp8: a step for a thread group of keys, which such a key takes along.
  if (!has_dims(shape.c, kind.precision) || kind.precision == Precision::int8_fp8) return;
  const Case c = case_of(shape.c, kind);
  const Inputs in = draw(c, index + 1);
  const Outputs want = exact(c, in, Pass::forward), clean = forward(c, in, kind);
  for (const double bad : {kInfinity, kNaN}) {
    if (kind.precision == Precision::fp8_raw && !std::isnan(bad)) continue;
    Inputs other = in;
    for (int64_t b = 0; b < c.batch; ++b)
      for (const int64_t j : shape.bad)
        for (int64_t channel = 0; channel < c.dim; ++channel) other.k.at(b, c.kv_heads - 1, j, channel) = bad;
    expect_reach(
        forward(c, other, kind).o, clean.o, want.o,
        [&](int64_t b, int64_t h, int64_t t) { return sees_one(c, in, shape.bad, b, h, t); }, std::isnan(bad),
        std::to_string(bad));
  }
}

// v that its type holds and that of the weights does not.
TEST(GpuReachOfF16, of_a_value_beyond_it_are_rows_that_see_it) {
  for (const int64_t dim : {64, 96, 128, 192, 256}) {
    SCOPED_TRACE(dim);
    Case c = shapes()[0].c;
    c.dim = c.dim_v = dim, c.dtype = DType::f32, c.out_dtype = DType::f32;
    const Inputs in = draw(c, 1);
    const Kind kind{Precision::f16};
    Inputs other = in;
    other.v.at(0, 1, 329, 0) = 7e4;
    const Outputs want = exact(c, in, Pass::forward);
    GpuPlace of_clean, of_other;
    const Attention attention = attention_for(c, kind);
    const Outputs clean = run(c, in, attention, Pass::forward, nullptr, &of_clean),
                  got = run(c, other, attention, Pass::forward, nullptr, &of_other);
    expect_reach(
        got.o, clean.o, want.o, [&](int64_t b, int64_t h, int64_t t) { return sees_one(c, in, {329}, b, h, t); }, true,
        "o");
  }
}

// With sinks, whose share the rows have that are written again.
TEST(GpuReachWithSinks, of_v_are_rows_that_see_it) {
  for (const Kind& kind : kForward) {
    SCOPED_TRACE(name_of(kind));
    Case c = case_of(shapes()[0].c, kind);
    c.sinks = Sinks::of_batch;
    const Inputs in = draw(c, 3);
    const Outputs want = exact(c, in, Pass::forward), clean = forward(c, in, kind);
    Inputs other = in;
    other.v.at(0, 1, 300, 0) = kNaN;
    expect_reach(
        forward(c, other, kind).o, clean.o, want.o,
        [&](int64_t b, int64_t h, int64_t t) { return sees_one(c, in, {300}, b, h, t); }, true, "o");
  }
}

class GpuReachBackward : public testing::TestWithParam<std::tuple<size_t, size_t>> {};
const std::vector<Kind> kBackward = gpu_kinds<Kind>(Pass::backward, {{Precision::bf16},
                                                                     {Precision::bf16, BiasCorrection::f16, true},
                                                                     {Precision::bf16, BiasCorrection::none},
                                                                     {Precision::bf16, BiasCorrection::none, true},
                                                                     {Precision::bf16, BiasCorrection::exact_delta},
                                                                     {Precision::f16},
                                                                     {Precision::f16, BiasCorrection::f16, true},
                                                                     {Precision::sagebwd}});

// Backward passes from the o and lse that the oracle saves, so that only what this pass does shows.
struct Passes {
  Case c;
  Kind kind;
  Inputs in;
  Outputs want, clean;

  Passes(const Shapes& shape, const Kind& kind, uint64_t seed) : Passes(case_of(shape.c, kind), kind, seed) {}
  Passes(const Case& c, const Kind& kind, uint64_t seed)
      : c(c), kind(kind), in(draw(c, seed)), want(exact(c, in, Pass::backward)) {
    clean = of(in);
  }
  Outputs saved(const Inputs& inputs) const {
    Attention plain = attention_of(c, kind.precision, "reference");
    plain.bias_correction = kind.bias_correction;
    return run(c, inputs, plain, Pass::forward);
  }
  Outputs of(const Inputs& inputs) const { return of(inputs, saved(inputs)); }
  Outputs of(const Inputs& inputs, const Outputs& saved) const {
    GpuPlace place;
    return run(c, inputs, attention_for(c, kind), Pass::backward, &saved, &place);
  }
};

bool has_gradients(const Case& c, const Kind& kind) {
  return kind.precision != Precision::sagebwd || std::max(c.dim, c.dim_v) <= 128;
}

// Keys or values that are not finite: rows of dq that see them, their own dk and dv, and what those rows of dq see.
TEST_P(GpuReachBackward, of_keys_are_rows_that_see_them) {
  const auto [index, which] = GetParam();
  const Shapes shape = shapes()[index];
  if (!has_gradients(shape.c, kBackward[which])) return;
  const Passes x(shape, kBackward[which], index + 1);
  const Case& c = x.c;
  for (const bool of_v : {false, true})
    for (const double bad : {kInfinity, kNaN}) {
      Inputs other = x.in;
      Values& operand = of_v ? other.v : other.k;
      for (int64_t b = 0; b < c.batch; ++b)
        for (const int64_t j : shape.bad)
          for (int64_t channel = 0; channel < operand.shape[3]; ++channel)
            operand.at(b, c.kv_heads - 1, j, channel) = bad;
      const Outputs got = x.of(other);
      const std::string what = std::string(of_v ? "v " : "k ") + std::to_string(bad) + ", ";
      const auto sees_bad = [&](int64_t b, int64_t h, int64_t t) { return sees_one(c, x.in, shape.bad, b, h, t); };
      const auto met = [&](int64_t b, int64_t g, int64_t j) {  // whether a query sees the key and a bad one
        const int64_t group = c.heads / c.kv_heads;
        for (int64_t h = g * group; h < (g + 1) * group; ++h)
          for (int64_t t = 0; t < c.tokens_q; ++t)
            if (sees_bad(b, h, t) && sees(c, x.in, b, h, t, j)) return true;
        return false;
      };
      expect_reach(got.dq, x.clean.dq, x.want.dq, sees_bad, true, what + "dq");
      expect_reach(got.dk, x.clean.dk, x.want.dk, met, false, what + "dk");
      expect_reach(got.dv, x.clean.dv, x.want.dv, met, false, what + "dv");
    }
}

// Queries, or gradients of their rows, that are not finite: their own dq, and the keys that they see.
TEST_P(GpuReachBackward, of_queries_are_keys_that_they_see) {
  const auto [index, which] = GetParam();
  const Shapes shape = shapes()[index];
  if (!has_gradients(shape.c, kBackward[which])) return;
  const Passes x(shape, kBackward[which], index + 1);
  const Case& c = x.c;
  for (const bool of_do : {false, true})
    for (const double bad : {kInfinity, kNaN}) {
      const int64_t query = shape.c.tokens_q - 70, head = c.heads - 1;
      Inputs other = x.in;
      Values& operand = of_do ? other.do_ : other.q;
      for (int64_t channel = 0; channel < operand.shape[3]; channel += 3) operand.at(0, head, query, channel) = bad;
      const Outputs got = x.of(other);
      const std::string what = std::string(of_do ? "do " : "q ") + std::to_string(bad) + ", ";
      bool any = false;
      for (int64_t j = 0; j < c.tokens_k; ++j) any |= sees(c, x.in, 0, head, query, j);
      const auto itself = [&](int64_t b, int64_t h, int64_t t) { return b == 0 && h == head && t == query; };
      const auto seen = [&](int64_t b, int64_t g, int64_t j) {
        return b == 0 && g == c.kv_heads - 1 && sees(c, x.in, 0, head, query, j);
      };
      expect_reach(got.dq, x.clean.dq, x.want.dq, itself, any, what + "dq");
      if (!any) continue;
      expect_reach(got.dk, x.clean.dk, x.want.dk, seen, true, what + "dk");
      expect_reach(got.dv, x.clean.dv, x.want.dv, seen, true, what + "dv");
    }
}

// Rows of do, or numbers of dlse, that are so many times larger.
struct Outlier {
  int64_t head, query;
  double factor;
};
std::string text_of(const std::vector<Outlier>& outliers) {
  std::string text;
  for (const Outlier& x : outliers)
    text +=
        "row " + std::to_string(x.head) + ' ' + std::to_string(x.query) + " times " + std::to_string(x.factor) + ' ';
  return text;
}

// Of what outliers reach no number errs by more than the largest error without them, times their size.
template <class Reached>
void expect_as_good_as_large(const Values& got, const Values& clean, const Values& want, const Values& clean_want,
                             double factor, const Reached& reached, const std::string& what) {
  double most = 0.0, error = 0.0;
  for_each(want.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
    most = std::fmax(most, std::fabs(clean.at(b, h, t, c) - clean_want.at(b, h, t, c)));
    if (reached(b, h, t)) {
      const double x = std::fabs(got.at(b, h, t, c) - want.at(b, h, t, c));
      if (!(x <= error)) error = x;
    }
  });
  EXPECT_LE(error, 4 * most * factor) << what;
}

void expect_reach_of_rows(const Passes& x, const std::vector<Outlier>& outliers, const Inputs& other,
                          const std::string& what) {
  const Case& c = x.c;
  const Outputs want = exact(c, other, Pass::backward), got = x.of(other);
  double factor = 1.0;
  for (const Outlier& o : outliers) factor = std::fmax(factor, o.factor);
  const auto itself = [&](int64_t b, int64_t h, int64_t t) {
    for (const Outlier& o : outliers)
      if (b == 0 && h == o.head && t == o.query) return true;
    return false;
  };
  const auto seen = [&](int64_t b, int64_t g, int64_t j) {
    for (const Outlier& o : outliers)
      if (b == 0 && g == kv_of(c, o.head) && sees(c, x.in, 0, o.head, o.query, j)) return true;
    return false;
  };
  expect_reach(got.dq, x.clean.dq, want.dq, itself, false, what + "dq");
  expect_reach(got.dk, x.clean.dk, want.dk, seen, false, what + "dk");
  expect_reach(got.dv, x.clean.dv, want.dv, seen, false, what + "dv");
  expect_as_good_as_large(got.dq, x.clean.dq, want.dq, x.want.dq, factor, itself, what + "dq of large rows");
  expect_as_good_as_large(got.dk, x.clean.dk, want.dk, x.want.dk, factor, seen, what + "dk of what they see");
  expect_as_good_as_large(got.dv, x.clean.dv, want.dv, x.want.dv, factor, seen, what + "dv of what they see");
}

// Rows of do far larger than the others: the other rows of dq, and dk and dv of keys that they do not see, are as good
// as without them.
TEST_P(GpuReachBackward, of_rows_of_do_are_their_rows_of_dq) {
  const auto [index, which] = GetParam();
  Shapes shape = shapes()[index];
  const Kind& kind = kBackward[which];
  if (kind.precision == Precision::sagebwd) return;  // 64 queries share scales
  std::vector<Case> cases = {case_of(shape.c, kind)};
  if (shape.c.causal && shape.c.alignment == Alignment::top_left) {
    cases.push_back(cases[0]);
    cases[1].causal = false, cases[1].alignment = Alignment::unspecified;
  }
  for (Case& c : cases) {
    if (kind.precision == Precision::f16) c.dtype = c.out_dtype = DType::f32;  // as f16 does not hold such rows
    const Passes x(c, kind, index + 1);
    const int64_t head = c.heads - 1, last = c.tokens_q - 1;
    std::vector<std::vector<Outlier>> lists = {
        {{head, 0, 1e7}}, {{head, 63, 1e7}, {head, 64, 1e7}}, {{head - 1, last - 70, 1e4}, {head, 129, 1e12}}};
    for (const double factor : {1e3, 1e4, 1e7, 1e12}) lists.push_back({{head, last, factor}});
    for (const std::vector<Outlier>& outliers : lists) {
      Inputs other = x.in;
      for (const Outlier& o : outliers)
        for (int64_t channel = 0; channel < c.dim_v; ++channel) other.do_.at(0, o.head, o.query, channel) *= o.factor;
      other.do_ = rounded(other.do_, c.dtype);
      expect_reach_of_rows(x, outliers, other, (c.causal ? "causal, " : "") + text_of(outliers) + ": ");
    }
  }
}

// dsinks of what a forward pass saved: sums over queries of exp(sink - lse) (dlse - delta), whose roundings in float32
// come to less than 2^-18 of the sum of magnitudes.
void expect_dsinks(const Case& c, const Inputs& in, const Outputs& saved, const Values& dsinks) {
  Values sums(dsinks.shape), magnitudes(dsinks.shape);
  for_each(c.lse_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t) {
    const int64_t of_batch = dsinks.shape[0] == 1 ? 0 : b;
    const double weight = std::exp(in.sinks.at(of_batch, h, 0, 0) - saved.lse.at(b, h, t, 0));
    double sum = in.dlse.at(b, h, t, 0), magnitude = std::fabs(sum);
    for (int64_t d = 0; d < c.dim_v; ++d) {
      const double x = in.do_.at(b, h, t, d) * (saved.o.at(b, h, t, d) + saved.o_residual.at(b, h, t, d));
      sum -= x, magnitude += std::fabs(x);
    }
    sums.at(of_batch, h, 0, 0) += weight * sum, magnitudes.at(of_batch, h, 0, 0) += weight * magnitude;
  });
  for_each(dsinks.shape, [&](int64_t b, int64_t h, int64_t, int64_t) {
    EXPECT_NEAR(dsinks.at(b, h, 0, 0), sums.at(b, h, 0, 0), 0x1p-18 * magnitudes.at(b, h, 0, 0)) << "head " << h;
  });
}

// As large gradients of lse are, which join delta.
TEST(GpuReachOfDlse, are_their_rows_of_dq) {
  for (const int64_t dim : {64, 80, 128, 160, 256})
    for (const bool deterministic : {false, true}) {
      SCOPED_TRACE(testing::Message() << dim << ", deterministic " << deterministic);
      const Kind kind{Precision::bf16, BiasCorrection::f16, deterministic};
      Case c = case_of(shapes()[0].c, kind);
      c.dim = c.dim_v = dim, c.sinks = Sinks::of_batch, c.dlse = true;
      const Passes x(c, kind, 5);
      for (const bool with_do : {false, true}) {
        std::vector<Outlier> outliers = {{c.heads - 1, 100, 1e7}};
        Inputs other = x.in;
        other.dlse.at(0, c.heads - 1, 100, 0) *= 1e7;
        if (with_do) {
          outliers.push_back({c.heads - 2, 200, 1e9});
          for (int64_t channel = 0; channel < dim; ++channel) other.do_.at(0, c.heads - 2, 200, channel) *= 1e9;
          other.do_ = rounded(other.do_, c.dtype);
        }
        expect_reach_of_rows(x, outliers, other, with_do ? "dlse and do: " : "dlse: ");
        const Outputs saved = x.saved(other);
        expect_dsinks(c, other, saved, x.of(other, saved).dsinks);
      }
    }
}

// The same bits each time, where sums of dq are integers.
TEST(GpuReachOfRows, is_the_same_each_time) {
  for (const int64_t dim : {64, 96, 128, 192, 256}) {
    const Kind kind{Precision::bf16, BiasCorrection::f16, true};
    Case c = case_of(shapes()[0].c, kind);
    c.dim = c.dim_v = dim;
    const Passes x(c, kind, 6);
    Inputs other = x.in;
    for (int64_t channel = 0; channel < dim; ++channel) other.do_.at(0, 3, 100, channel) *= 0x1p24;
    const Outputs first = x.of(other), second = x.of(other);
    EXPECT_EQ(first.dq.data, second.dq.data) << dim;
    EXPECT_EQ(first.dk.data, second.dk.data) << dim;
    EXPECT_EQ(first.dv.data, second.dv.data) << dim;
  }
}

// The last shape has fewer queries than these tests spoil.
INSTANTIATE_TEST_SUITE_P(Kinds, GpuReachBackward,
                         testing::Combine(testing::Range<size_t>(0, shapes().size() - 1),
                                          testing::Range<size_t>(0, std::size(kBackward))),
                         [](const auto& info) {
                           return std::string(shapes()[std::get<0>(info.param)].name) + '_' +
                                  name_of(kBackward[std::get<1>(info.param)]);
                         });

INSTANTIATE_TEST_SUITE_P(Kinds, GpuReach,
                         testing::Combine(testing::Range<size_t>(0, shapes().size()),
                                          testing::Range<size_t>(0, std::size(kForward))),
                         [](const auto& info) {
                           return std::string(shapes()[std::get<0>(info.param)].name) + '_' +
                                  name_of(kForward[std::get<1>(info.param)]);
                         });

}  // namespace
}  // namespace octet::test
