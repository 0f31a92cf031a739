// What nobody sees does not exist, and what a token holds reaches the rows that meet it: the laws of
// tests/laws/unseen_test.cc and reach_test.cc on a GPU.
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

struct Kind {
  Precision precision;
  BiasCorrection bias_correction = BiasCorrection::f16;
};
const std::vector<Kind> kKinds = gpu_kinds<Kind>(Pass::forward, {{Precision::f32},
                                                                 {Precision::bf16},
                                                                 {Precision::bf16, BiasCorrection::none},
                                                                 {Precision::f16},
                                                                 {Precision::int8},
                                                                 {Precision::int8_f16},
                                                                 {Precision::int8_fp8},
                                                                 {Precision::fp8},
                                                                 {Precision::fp8_raw},
                                                                 {Precision::sagebwd}});

std::string label(const testing::TestParamInfo<Kind>& info) {
  return std::string(name(info.param.precision)) + (info.param.bias_correction == BiasCorrection::none ? "_none" : "");
}

Attention on_gpu(const Case& c, const Kind& kind) {
  Attention a = attention_of(c, kind.precision, gpu_backend());
  if (kind.precision == Precision::bf16) a.bias_correction = kind.bias_correction;
  return a;
}
Outputs run_on_gpu(const Case& c, const Inputs& in, const Attention& attention, Pass pass,
                   const Outputs* saved = nullptr) {
  GpuPlace place;
  return run(c, in, attention, pass, saved, &place);
}

bool has_backward(Precision p, int64_t dim) {
  if (p == Precision::sagebwd && dim > 128) return false;
  if (dim > gpu_most_dim(p, Pass::backward)) return false;
  return (p == Precision::f32 || p == Precision::bf16 || p == Precision::f16 || p == Precision::sagebwd) &&
         gpu_computes(Pass::backward, p);
}

std::vector<int64_t> dims_of(Precision p) {
  std::vector<int64_t> dims = {64, 128};
  if (p == Precision::f32 || p == Precision::bf16 || p == Precision::f16) dims = {64, 80, 128, 160};
  for (const int64_t dim : {256, 512})
    if (dim <= gpu_most_dim(p)) dims.push_back(dim);
  return dims;
}

void round_inputs(const Case& c, Inputs& in) {
  for (Values* x : {&in.q, &in.k, &in.v, &in.do_}) *x = rounded(*x, c.dtype);
}

void expect_same_bits(const Values& got, const Values& want, const std::string& what) {
  ASSERT_EQ(got.data.size(), want.data.size()) << what;
  int64_t differ = 0;
  for (size_t i = 0; i < want.data.size(); ++i) differ += !(got.data[i] == want.data[i]);
  EXPECT_EQ(differ, 0) << what << ", of " << want.data.size() << " numbers; " << text(difference(got, want));
}

struct Content {
  const char* name;
  double (*number)(uint64_t draw);
};
const Content kContents[] = {
    {"numbers of 1e4 with both signs", [](uint64_t i) { return i % 3 ? 1e4 : -1e4; }},
    {"1e30", [](uint64_t) { return 1e30; }},
    {"numbers of every size, -inf and NaN",
     [](uint64_t i) {
       const double x = i % 11 == 7   ? kNaN
                        : i % 11 == 3 ? -kInfinity
                                      : std::ldexp(1.5, static_cast<int>(i * 37 % 250) - 125);
       return i % 2 ? x : -x;
     }},
};

// Keys and values that no query sees, and queries that see no key, may hold anything: no bit of any result changes.
class GpuUnseen : public testing::TestWithParam<Kind> {};

TEST_P(GpuUnseen, tokens_may_hold_anything) {
  const Kind kind = GetParam();
  for (Case c : partly_seen_cases()) {
    const Inputs drawn = draw(c, 1);
    const auto takes = [&](Pass pass, const Attention& attention) {
      return gpu_takes_logits(c, pass, attention, drawn.mask_dtype, drawn.mask.shape);
    };
    for (const int64_t dim : dims_of(kind.precision))
      for (const bool in_words : {true, false}) {  // bf16 is read where it lies, f32 is copied first
        c.dim = c.dim_v = dim;
        c.kv_heads = 1;
        c.dtype = in_words ? DType::bf16 : DType::f32;
        c.out_dtype = in_words ? DType::bf16 : DType::f32;
        if (!takes(Pass::forward, on_gpu(c, kind))) continue;
        const bool has_gradients = has_backward(kind.precision, dim) && takes(Pass::backward, on_gpu(c, kind));
        c.sinks = has_gradients ? Sinks::shared : Sinks::none;
        c.dlse = has_gradients;
        const PartlySeen x = partly_seen(c, 1);
        const Attention gpu = on_gpu(x.c, kind);
        const Outputs want = run_on_gpu(x.c, x.in, gpu, Pass::forward);
        for (const bool deterministic : {true, false}) {
          if (!deterministic && !has_gradients) continue;
          Attention attention = gpu;
          attention.deterministic = deterministic;
          Outputs gradients;
          const bool differentiates = has_gradients && takes(Pass::backward, attention);
          if (differentiates) gradients = run_on_gpu(x.c, x.in, attention, Pass::backward, &want);
          for (const Content& content : kContents) {
            const std::string what = std::string(" of ") + x.c.name + ", head dim " + std::to_string(dim) +
                                     (in_words ? ", bf16" : ", f32") + (deterministic ? ", deterministic" : "") +
                                     ", unseen: " + content.name;
            Inputs filled = with_unseen(x, content.number);
            round_inputs(x.c, filled);
            if (deterministic) {
              const Outputs got = run_on_gpu(x.c, filled, gpu, Pass::forward);
              expect_same_bits(got.o, want.o, "o" + what);
              expect_same_bits(got.lse, want.lse, "lse" + what);
              if (want.o_residual.present()) expect_same_bits(got.o_residual, want.o_residual, "o_residual" + what);
            }
            if (!differentiates) continue;
            const Outputs got = run_on_gpu(x.c, filled, attention, Pass::backward, &want);
            if (deterministic)
              expect_same_bits(got.dq, gradients.dq, "dq" + what);
            else  // sums come in any order
              EXPECT_LE(difference(got.dq, gradients.dq).relative(), 0x1p-8) << "dq" << what;
            expect_same_bits(got.dk, gradients.dk, "dk" + what);
            expect_same_bits(got.dv, gradients.dv, "dv" + what);
            expect_same_bits(got.dsinks, gradients.dsinks, "dsinks" + what);
          }
        }
      }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, GpuUnseen, testing::ValuesIn(kKinds), label);

// A later key that holds numbers far from all others. Tiles of keys hold at most 256 of them.
constexpr int64_t kTokens = 900, kLast = kTokens - 1, kTileBefore = 600;
Case future(int64_t dim) {
  return {.name = "future",
          .heads = 2,
          .kv_heads = 2,
          .tokens_q = kTokens,
          .tokens_k = kTokens,
          .dim = dim,
          .dim_v = dim,
          .causal = true,
          .dtype = DType::bf16,
          .out_dtype = DType::f32};
}

Values before(const Values& x, int64_t rows) { return slice(x, 2, 0, rows); }

void expect_as_good(const Values& got, const Values& clean, const Values& want, int64_t rows, const std::string& what) {
  const double error = difference(before(got, rows), before(want, rows)).rms,
               plain = difference(before(clean, rows), before(want, rows)).rms;
  EXPECT_LE(error, 1.5 * plain + 1e-7) << what << ": the " << rows << " rows before err by " << error
                                       << ", without it by " << plain;
}

class GpuFarKeys : public testing::TestWithParam<Kind> {};

TEST_P(GpuFarKeys, of_the_last_key_are_rows_that_see_it) {
  const Kind kind = GetParam();
  // k by groups or blocks of 64 keys, v by channels or such blocks: published recipes, in which a key moves others
  // (docs/numerics.md).
  const bool sagebwd = kind.precision == Precision::sagebwd,
             k_shares = kind.precision == Precision::int8_fp8 || sagebwd,
             v_shares = kind.precision == Precision::int8_fp8 || kind.precision == Precision::fp8 || sagebwd;
  for (const int64_t dim : dims_of(kind.precision)) {
    const Case c = future(dim);
    const Inputs in = draw(c, 1);
    const Outputs want = exact(c, in, Pass::forward);
    const Attention gpu = on_gpu(c, kind);
    const Outputs clean = run_on_gpu(c, in, gpu, Pass::forward);
    for (const bool of_v : {false, true})
      for (const double x : {30.0, 1e3, 7e4, 1e6, 1e20, 1e30}) {
        if (of_v && v_shares) continue;
        Inputs other = in;
        for (int64_t d = 0; d < dim; ++d) (of_v ? other.v : other.k).at(0, 1, kLast, d) = d % 3 ? x : -x;
        round_inputs(c, other);
        const std::string what =
            "head dim " + std::to_string(dim) + ", last " + (of_v ? "v " : "k ") + std::to_string(x);
        const Outputs got = run_on_gpu(c, other, gpu, Pass::forward);
        // Where v becomes f16, what f16 does not hold is infinite.
        const bool f16 = kind.precision == Precision::f16 || kind.precision == Precision::int8_f16 ||
                         (kind.precision == Precision::bf16 && kind.bias_correction == BiasCorrection::f16);
        const bool leaves_f16 = of_v && f16 && x > (kind.precision == Precision::f16 ? 6e4 : 1e7);
        const int64_t rows = !of_v && k_shares ? kTileBefore : kLast;
        expect_as_good(got.o, clean.o, want.o, rows, "o, " + what);
        expect_as_good(got.lse, clean.lse, want.lse, of_v ? kTokens : rows, "lse, " + what);
        if (leaves_f16) {  // never a number that could be true
          const double last = got.o.at(0, 1, kLast, 0), right = exact(c, other, Pass::forward).o.at(0, 1, kLast, 0);
          EXPECT_TRUE(!std::isfinite(last) || std::fabs(last - right) <= 0x1p-6 * std::fabs(right)) << what;
        }
      }
  }
}

// Half of all keys, from the middle on, are far larger than those before.
TEST_P(GpuFarKeys, of_many_keys_are_rows_that_see_them) {
  const Kind kind = GetParam();
  if (kind.precision == Precision::int8_fp8 || kind.precision == Precision::fp8) return;  // v by channels
  constexpr int64_t kFirst = 600;
  const int64_t rows = kind.precision == Precision::sagebwd ? kFirst / 64 * 64 : kFirst;  // k by blocks of 64 keys
  for (const int64_t dim : dims_of(kind.precision)) {
    const Case c = future(dim);
    const Inputs in = draw(c, 2);
    Inputs other = in;
    for (Values* x : {&other.k, &other.v})
      for_each(x->shape, [&](int64_t b, int64_t h, int64_t t, int64_t d) {
        if (t >= kFirst && t % 2) x->at(b, h, t, d) *= 0x1p12;
      });
    const Attention gpu = on_gpu(c, kind);
    const Outputs want = exact(c, in, Pass::forward), clean = run_on_gpu(c, in, gpu, Pass::forward),
                  got = run_on_gpu(c, other, gpu, Pass::forward);
    expect_as_good(got.o, clean.o, want.o, rows, "o, head dim " + std::to_string(dim));
    expect_as_good(got.lse, clean.lse, want.lse, rows, "lse, head dim " + std::to_string(dim));
  }
}

// In the backward pass the mean of k, which the kernels subtract, is as robust. ds of a head has one power of two, so v
// may not be as large.
TEST_P(GpuFarKeys, of_the_last_key_are_gradients_of_queries_that_see_it) {
  const Kind kind = GetParam();
  if (kind.precision == Precision::sagebwd) return;  // 64 queries and 64 keys share scales
  for (const int64_t dim : dims_of(kind.precision)) {
    if (!has_backward(kind.precision, dim)) continue;
    const Case c = future(dim);
    const Inputs in = draw(c, 3);
    const Outputs want = exact(c, in, Pass::backward);
    const Attention gpu = on_gpu(c, kind);
    const auto gradients = [&](const Inputs& inputs) {
      const Outputs saved = run_on_gpu(c, inputs, gpu, Pass::forward);
      return run_on_gpu(c, inputs, gpu, Pass::backward, &saved);
    };
    const Outputs clean = gradients(in);
    for (const auto& [of_v, x] : {std::pair{false, 30.0}, {false, 1e3}, {false, 3e4}, {true, 30.0}, {true, 1e3}}) {
      Inputs other = in;
      for (int64_t d = 0; d < dim; ++d) (of_v ? other.v : other.k).at(0, 1, kLast, d) = d % 3 ? x : -x;
      round_inputs(c, other);
      expect_as_good(gradients(other).dq, clean.dq, want.dq, kLast,
                     "dq, head dim " + std::to_string(dim) + ", last " + (of_v ? "v " : "k ") + std::to_string(x));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, GpuFarKeys, testing::ValuesIn(kKinds), label);

// Numbers near the ends of float32: scales, and values of one size.
class GpuSizes : public testing::TestWithParam<Kind> {};

TEST_P(GpuSizes, of_scale_may_be_the_smallest) {
  for (const int64_t dim : dims_of(GetParam().precision)) {
    Case c = future(dim);
    c.tokens_q = c.tokens_k = 300;
    const Inputs in = draw(c, 4);
    const auto error = [&](float scale) {
      c.scale = scale;
      const Outputs want = exact(c, in, Pass::forward), got = run_on_gpu(c, in, on_gpu(c, GetParam()), Pass::forward);
      return std::pair{difference(got.o, want.o).rms, difference(got.lse, want.lse).rms};
    };
    const auto usual = error(1e-4f);
    for (const float scale : {0x1p-126f, 1.2e-38f, 3e-38f, 1e-30f}) {
      const auto [o, lse] = error(scale);
      EXPECT_LE(o, 1.5 * usual.first) << "o, head dim " << dim << ", scale " << scale;
      EXPECT_LE(lse, 1.5 * usual.second + 1e-6) << "lse, head dim " << dim << ", scale " << scale;
    }
  }
}

TEST_P(GpuSizes, of_v_are_those_of_o) {
  const Kind kind = GetParam();
  if (kind.precision == Precision::fp8_raw || kind.precision == Precision::f16) return;  // v is cast
  for (const int64_t dim : dims_of(kind.precision)) {
    Case c = future(dim);
    c.tokens_q = c.tokens_k = 300;
    const Inputs in = draw(c, 5);
    const Outputs want = exact(c, in, Pass::forward);
    const Attention gpu = on_gpu(c, kind);
    const double usual = difference(run_on_gpu(c, in, gpu, Pass::forward).o, want.o).rms;
    for (const int exponent : {-123, -110, -106, -80, 60, 100}) {
      Inputs other = in;
      for (double& x : other.v.data) x = std::ldexp(x, exponent);
      for (int64_t d = 0; d < dim; ++d) other.v.at(0, 0, 77, d) = 0;  // a token of zeros
      Inputs same = other;
      for (double& x : same.v.data) x = std::ldexp(x, -exponent);
      Values o = run_on_gpu(c, other, gpu, Pass::forward).o;
      for (double& x : o.data) x = std::ldexp(x, -exponent);
      const double floor = std::ldexp(static_cast<double>(c.tokens_k), -126 - exponent);  // below the normal numbers
      EXPECT_LE(difference(o, exact(c, same, Pass::forward).o).rms, 1.5 * usual + floor)
          << "head dim " << dim << ", v times 2^" << exponent;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, GpuSizes, testing::ValuesIn(kKinds), label);

}  // namespace
}  // namespace octet::test
