// Sinks and the gradient of lse on the GPU: against what they do to a row, against the definition in float64, and far
// out of range.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "gpu/place.h"
#include "support/cases.h"

namespace octet::test {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();

// Tokens that attend to each other, and the keys that each query sees.
struct Run {
  int64_t batch, q_first, q_tokens, k_first, k_tokens;
};
std::vector<Run> runs_of(const Case& c) {
  std::vector<Run> runs;
  for (int64_t b = 0; c.cu_seqlens_q.empty() && b < c.batch; ++b) runs.push_back({b, 0, c.tokens_q, 0, c.tokens_k});
  for (size_t s = 0; s + 1 < c.cu_seqlens_q.size(); ++s)
    runs.push_back({0, c.cu_seqlens_q[s], c.cu_seqlens_q[s + 1] - c.cu_seqlens_q[s], c.cu_seqlens_k[s],
                    c.cu_seqlens_k[s + 1] - c.cu_seqlens_k[s]});
  return runs;
}
std::pair<int64_t, int64_t> keys_of(const Case& c, const Run& run, int64_t i) {
  if (!c.causal && !c.window) return {0, run.k_tokens};
  const int64_t diagonal = i + (c.alignment == Alignment::bottom_right ? run.k_tokens - run.q_tokens : 0);
  const int64_t left = c.window ? (*c.window)[0] : run.k_tokens + run.q_tokens;
  const int64_t right = c.causal ? 0 : (*c.window)[1];
  const int64_t first = std::clamp<int64_t>(diagonal - left, 0, run.k_tokens);
  return {first, std::max(first, std::clamp<int64_t>(diagonal + right + 1, 0, run.k_tokens))};
}

// Attention by its definition.
struct Exact {
  Values o, lse, dq, dk, dv, dsinks;
};
double sink_of(const Values& sinks, int64_t b, int64_t h) {
  return sinks.present() ? sinks.at(sinks.shape[0] == 1 ? 0 : b, h, 0, 0) : kNone;
}
Exact definition(const Case& c, const Inputs& in, const Values& sinks, const Values& dlse) {
  Exact x;
  x.o = Values(c.o_shape()), x.lse = Values(c.lse_shape()), x.dq = Values(c.q_shape()), x.dk = Values(c.k_shape()),
  x.dv = Values(c.v_shape());
  if (sinks.present()) x.dsinks = Values(sinks.shape);
  const double scale = c.effective_scale();
  for (const Run& run : runs_of(c))
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t i = 0; i < run.q_tokens; ++i) {
        const int64_t b = run.batch, g = h / (c.heads / c.kv_heads), t = run.q_first + i;
        const auto [first, last] = keys_of(c, run, i);
        const double sink = sink_of(sinks, b, h);
        std::vector<double> p(static_cast<size_t>(last - first)), dp(p.size());
        double most = sink;
        for (size_t j = 0; j < p.size(); ++j) {
          const int64_t key = run.k_first + first + static_cast<int64_t>(j);
          for (int64_t d = 0; d < c.dim; ++d) p[j] += in.q.at(b, h, t, d) * in.k.at(b, g, key, d);
          p[j] *= scale, most = std::max(most, p[j]);
        }
        if (most == kNone) {
          x.lse.at(b, h, t, 0) = kNone;
          continue;
        }
        double sum = std::exp(sink - most), delta = 0.0;
        for (const double s : p) sum += std::exp(s - most);
        const double lse = x.lse.at(b, h, t, 0) = most + std::log(sum);
        for (size_t j = 0; j < p.size(); ++j) {
          const int64_t key = run.k_first + first + static_cast<int64_t>(j);
          p[j] = std::exp(p[j] - lse);
          for (int64_t d = 0; d < c.dim_v; ++d) {
            x.o.at(b, h, t, d) += p[j] * in.v.at(b, g, key, d);
            x.dv.at(b, g, key, d) += p[j] * in.do_.at(b, h, t, d);
            dp[j] += in.v.at(b, g, key, d) * in.do_.at(b, h, t, d);
          }
          delta += p[j] * dp[j];
        }
        const double of_lse = dlse.present() ? dlse.at(b, h, t, 0) : 0.0;
        for (size_t j = 0; j < p.size(); ++j) {
          const int64_t key = run.k_first + first + static_cast<int64_t>(j);
          const double ds = scale * p[j] * (dp[j] - delta + of_lse);
          for (int64_t d = 0; d < c.dim; ++d) {
            x.dq.at(b, h, t, d) += ds * in.k.at(b, g, key, d);
            x.dk.at(b, g, key, d) += ds * in.q.at(b, h, t, d);
          }
        }
        if (sinks.present() && sink != kNone) {
          const int64_t of = sinks.shape[0] == 1 ? 0 : b;
          x.dsinks.at(of, h, 0, 0) += std::exp(sink - lse) * (of_lse - delta);
        }
      }
  return x;
}

// A forward pass; every output is on its guard.
Outputs forward(const Case& c, const Inputs& in, const Attention& attention, const Values& sinks) {
  GpuPlace place;
  const auto at = [&](const Buffer& x) { return x.present() ? place.tensor(x) : Tensor{}; };
  const auto cu = [](const std::vector<int32_t>& first) {
    if (first.empty()) return Buffer();
    Values values({1, 1, 1, static_cast<int64_t>(first.size())});
    std::copy(first.begin(), first.end(), values.data.begin());
    return Buffer(values, DType::i32);
  };
  const Buffer q(in.q, c.dtype, c.layout), k(in.k, c.dtype, c.kv_layout), v(in.v, c.dtype, c.kv_layout);
  const Buffer o(c.out_dtype, c.o_shape(), c.layout), lse(DType::f32, c.lse_shape(), Layout::padded);
  const Buffer o_residual = c.has_residual() ? Buffer(c.residual_dtype(), c.o_shape(), c.layout) : Buffer();
  const Buffer of_sinks = sinks.present() ? Buffer(sinks, DType::f32, Layout::padded) : Buffer();
  const Buffer cu_q = cu(c.cu_seqlens_q), cu_k = cu(c.cu_seqlens_k);
  call(attention,
       Forward{.q = at(q),
               .k = at(k),
               .v = at(v),
               .o = at(o),
               .lse = at(lse),
               .o_residual = at(o_residual),
               .extras = {.sinks = at(of_sinks), .cu_seqlens_q = at(cu_q), .cu_seqlens_k = at(cu_k)}},
       place);
  for (const Buffer* x : {&o, &lse, &o_residual}) EXPECT_EQ(x->damage(), "");
  Outputs out;
  out.o = o.values(), out.lse = lse.values(), out.o_residual = residual_of(c, out.o, o_residual);
  return out;
}

struct Gradients {
  Values dq, dk, dv, dsinks;
};
// A backward pass from a saved o in float32.
Gradients backward(const Case& c, const Inputs& in, const Attention& attention, const Exact& saved, const Values& sinks,
                   const Values& dlse) {
  GpuPlace place;
  const auto at = [&](const Buffer& x) { return x.present() ? place.tensor(x) : Tensor{}; };
  const auto cu = [](const std::vector<int32_t>& first) {
    if (first.empty()) return Buffer();
    Values values({1, 1, 1, static_cast<int64_t>(first.size())});
    std::copy(first.begin(), first.end(), values.data.begin());
    return Buffer(values, DType::i32);
  };
  const Buffer q(in.q, c.dtype, c.layout), k(in.k, c.dtype, c.kv_layout), v(in.v, c.dtype, c.kv_layout);
  const Buffer o(saved.o, DType::f32, c.layout), lse(saved.lse, DType::f32, Layout::padded);
  const Buffer do_(in.do_, c.dtype, c.layout);
  const Buffer dq(DType::f32, c.q_shape(), c.layout), dk(DType::f32, c.k_shape(), c.kv_layout),
      dv(DType::f32, c.v_shape(), c.kv_layout);
  const Buffer of_sinks = sinks.present() ? Buffer(sinks, DType::f32, Layout::padded) : Buffer();
  const Buffer dsinks = sinks.present() ? Buffer(DType::f32, sinks.shape, Layout::padded) : Buffer();
  const Buffer of_dlse = dlse.present() ? Buffer(dlse, DType::f32, Layout::padded) : Buffer();
  const Buffer cu_q = cu(c.cu_seqlens_q), cu_k = cu(c.cu_seqlens_k);
  call(attention,
       Backward{.q = at(q),
                .k = at(k),
                .v = at(v),
                .o = at(o),
                .lse = at(lse),
                .do_ = at(do_),
                .dq = at(dq),
                .dk = at(dk),
                .dv = at(dv),
                .dlse = at(of_dlse),
                .dsinks = at(dsinks),
                .extras = {.sinks = at(of_sinks), .cu_seqlens_q = at(cu_q), .cu_seqlens_k = at(cu_k)}},
       place);
  for (const Buffer* x : {&dq, &dk, &dv, &dsinks}) EXPECT_EQ(x->damage(), "");
  Gradients out{dq.values(), dk.values(), dv.values(), {}};
  if (sinks.present()) out.dsinks = dsinks.values();
  return out;
}

// Head h of batch element b, around the logits' log sum of some 5.
Values drawn_sinks(const Case& c, bool shared, std::vector<double> values) {
  Values sinks({shared ? 1 : c.batch, c.heads, 1, 1});
  for (size_t i = 0; i < sinks.data.size(); ++i) sinks.data[i] = values[i % values.size()];
  return rounded(sinks, DType::f32);
}

struct Shapes {
  const char* name;
  Case c;
  bool shared;
};
std::vector<Shapes> shapes() {
  const Case plain{.name = "",
                   .batch = 2,
                   .heads = 6,
                   .kv_heads = 2,
                   .tokens_q = 230,
                   .tokens_k = 330,
                   .dim = 64,
                   .dim_v = 64,
                   .dtype = DType::bf16,
                   .out_dtype = DType::f32};
  std::vector<Shapes> list = {{"full", plain, true}, {"full_128", plain, false}, {"causal", plain, false}};
  list[1].c.dim = list[1].c.dim_v = 128;
  list[2].c.causal = true, list[2].c.alignment = Alignment::bottom_right, list[2].c.layout = Layout::bthd;
  list.push_back({"rows_without_keys", list[2].c, true});
  list.back().c.dim = list.back().c.dim_v = 128, list.back().c.tokens_k = 170;
  list.push_back({"window", plain, true});
  list.back().c.window = {{40, 10}}, list.back().c.alignment = Alignment::top_left;
  list.push_back({"small_heads_padded", plain, false});
  list.back().c.dim = 40, list.back().c.dim_v = 72, list.back().c.layout = list.back().c.kv_layout = Layout::padded;
  list.push_back({"no_keys", plain, true});
  list.back().c.tokens_k = 0;
  list.push_back({"packed", plain, true});
  Case& packed = list.back().c;
  packed.batch = 1, packed.causal = true, packed.alignment = Alignment::bottom_right, packed.dim = packed.dim_v = 128;
  packed.cu_seqlens_q = {0, 70, 71, 71, 230}, packed.cu_seqlens_k = {0, 0, 90, 130, 330};
  list.push_back({"wide_192_128", plain, true});
  list.back().c.dim = 192, list.back().c.dim_v = 128;
  list.push_back({"wide_256_causal", plain, false});
  list.back().c.dim = list.back().c.dim_v = 256, list.back().c.causal = true,
  list.back().c.alignment = Alignment::top_left;
  return list;
}

struct Kind {
  Precision precision;
  BiasCorrection bias_correction = BiasCorrection::f16;
  bool deterministic = false;
};
std::string name_of(const Kind& kind) {
  return name(kind.precision) + suffix_of(kind.bias_correction) + (kind.deterministic ? "_deterministic" : "");
}
Attention attention_for(const Case& c, const Kind& kind) {
  Attention a = attention_of(c, kind.precision, gpu_backend());
  if (kind.precision == Precision::bf16 || kind.precision == Precision::f16) a.bias_correction = kind.bias_correction;
  a.deterministic = kind.deterministic;
  return a;
}
bool fits(const Case& c, Precision precision) { return std::max(c.dim, c.dim_v) <= gpu_most_dim(precision); }

// A sink takes its share of every row, whatever the kernel: o is that without it times exp(lse - lse'), where lse' is
// the log of the sum of both. It may be far above and below the logits.
class GpuSinks : public testing::TestWithParam<std::tuple<size_t, size_t>> {};
const std::vector<Kind> kForward = gpu_kinds<Kind>(Pass::forward, {{Precision::bf16},
                                                                   {Precision::bf16, BiasCorrection::none},
                                                                   {Precision::bf16, BiasCorrection::beta},
                                                                   {Precision::f16},
                                                                   {Precision::f16, BiasCorrection::beta},
                                                                   {Precision::int8},
                                                                   {Precision::int8_f16},
                                                                   {Precision::int8_fp8},
                                                                   {Precision::fp8},
                                                                   {Precision::fp8_raw},
                                                                   {Precision::sagebwd}});

TEST_P(GpuSinks, take_their_share) {
  const auto [index, which] = GetParam();
  const auto [label, c, shared] = shapes()[index];
  const Kind& kind = kForward[which];
  if (!fits(c, kind.precision)) return;
  Inputs in = draw(c, index + 1);
  for (double& x : in.v.data) x = x + 4.0;  // v loses its mean, which the keys' share belongs to, too
  in.v = rounded(in.v, c.dtype);
  const Attention attention = attention_for(c, kind);
  const Values sinks = drawn_sinks(c, shared, {5.25, kNone, 300, -300, 2.5, 9, 3e4, -3e38});
  const Outputs without = forward(c, in, attention, {}), with = forward(c, in, attention, sinks);
  for_each(c.lse_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t) {
    const double sink = sink_of(sinks, b, h), keys = without.lse.at(b, h, t, 0), most = std::max(sink, keys);
    const double total = most == kNone ? kNone : most + std::log(std::exp(sink - most) + std::exp(keys - most));
    const double lse = with.lse.at(b, h, t, 0);
    // The logarithms are rounded to float32 a few times on the way.
    const double bound = 0x1p-21 * (1 + std::fabs(std::max(sink, -1e3)) + (keys == kNone ? 0.0 : std::fabs(keys)));
    if (total == kNone)
      ASSERT_EQ(lse, kNone) << b << ' ' << h << ' ' << t;
    else
      ASSERT_NEAR(lse, total, bound) << b << ' ' << h << ' ' << t << ", sink " << sink << ", keys " << keys;
    const double share = total == kNone ? 1.0 : std::exp(keys - total);
    for (int64_t d = 0; d < c.dim_v; ++d) {
      const double o = without.o.at(b, h, t, d) * share;
      ASSERT_NEAR(with.o.at(b, h, t, d), o, 2 * bound * std::fabs(o) + 0x1p-126)
          << b << ' ' << h << ' ' << t << ' ' << d;
    }
  });
  if (kind.precision != Precision::bf16 && kind.precision != Precision::f16) return;
  // With an output of 16 bits and its residual, which in bf16 has 2^-16 of a number, or at a tie loses twice as much.
  Case rounded_case = c;
  rounded_case.out_dtype = kind.precision == Precision::bf16 ? DType::bf16 : DType::f16;
  const Outputs pair = forward(rounded_case, in, attention, sinks);
  for_each(c.o_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t d) {
    const double o = with.o.at(b, h, t, d), got = pair.o.at(b, h, t, d) + pair.o_residual.at(b, h, t, d);
    ASSERT_NEAR(got, o, 0x1p-15 * std::fabs(o) + 0x1p-24) << b << ' ' << h << ' ' << t << ' ' << d;
  });
}

INSTANTIATE_TEST_SUITE_P(Kinds, GpuSinks,
                         testing::Combine(testing::Range<size_t>(0, shapes().size()),
                                          testing::Range<size_t>(0, std::size(kForward))),
                         [](const auto& info) {
                           return std::string(shapes()[std::get<0>(info.param)].name) + '_' +
                                  name_of(kForward[std::get<1>(info.param)]);
                         });

// What gradients of a call with sinks and a gradient of lse may differ from the definition by: twice what rounding
// as the recipe does costs without them (the oracle of the recipe), relative to the gradient.
struct Bars {
  double dq, dk, dv;
};
Bars bars_of(const Case& c, const Inputs& in, const Kind& kind) {
  Attention plain = attention_of(c, kind.precision, "reference");
  plain.bias_correction = kind.bias_correction;
  const Outputs want = exact(c, in, Pass::backward), saved = run(c, in, plain, Pass::forward);
  const Outputs got = run(c, in, plain, Pass::backward, &saved);
  return {2 * difference(got.dq, want.dq).relative(), 2 * difference(got.dk, want.dk).relative(),
          2 * difference(got.dv, want.dv).relative()};
}
void expect_within(const char* label, const Values& got, const Values& want, double bar) {
  if (want.data.empty()) return;
  const Difference d = difference(got, want);
  EXPECT_LE(d.relative(), bar) << label << ": " << text(d);
}

class GpuLseGradient : public testing::TestWithParam<std::tuple<size_t, size_t>> {};
const std::vector<Kind> kBackward = gpu_kinds<Kind>(Pass::backward, {{Precision::bf16},
                                                                     {Precision::bf16, BiasCorrection::f16, true},
                                                                     {Precision::bf16, BiasCorrection::none},
                                                                     {Precision::bf16, BiasCorrection::none, true},
                                                                     {Precision::bf16, BiasCorrection::exact_delta},
                                                                     {Precision::bf16, BiasCorrection::beta},
                                                                     {Precision::f16},
                                                                     {Precision::f16, BiasCorrection::none},
                                                                     {Precision::sagebwd},
                                                                     {Precision::sagebwd, BiasCorrection::f16, true}});

TEST_P(GpuLseGradient, and_those_of_sinks_are_those_of_the_definition) {
  const auto [index, which] = GetParam();
  auto [label, c, shared] = shapes()[index];
  const Kind& kind = kBackward[which];
  if (kind.precision == Precision::sagebwd && std::max(c.dim, c.dim_v) > 128) return;
  if (kind.precision == Precision::f16) c.dtype = DType::f16;
  Inputs in = draw(c, index + 11);
  // An offset of k, whose mean the kernels leave out of dq's products.
  for_each(c.k_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t d) { in.k.at(b, h, t, d) += d % 3 ? 0.0 : 2.0; });
  in.k = rounded(in.k, c.dtype);
  const Attention attention = attention_for(c, kind);
  const Bars bars = bars_of(c, in, kind);
  const Values dlse = rounded(normal(c.lse_shape(), index + 31), DType::f32);
  const Values sinks = drawn_sinks(c, shared, {5.25, kNone, 7, -3, 2.5});
  for (const bool with_sinks : {false, true})
    for (const bool with_dlse : {false, true}) {
      SCOPED_TRACE(testing::Message() << "sinks " << with_sinks << ", dlse " << with_dlse);
      const Values given_sinks = with_sinks ? sinks : Values(), given_dlse = with_dlse ? dlse : Values();
      const Exact want = definition(c, in, given_sinks, given_dlse);
      const Gradients got = backward(c, in, attention, want, given_sinks, given_dlse);
      expect_within("dq", got.dq, want.dq, bars.dq);
      expect_within("dk", got.dk, want.dk, bars.dk);
      expect_within("dv", got.dv, want.dv, bars.dv);
      constexpr double kDelta = 1e-4;  // delta is a sum of float32 products of a rounded o
      if (with_sinks) expect_within("dsinks", got.dsinks, want.dsinks, kDelta);
    }
}

INSTANTIATE_TEST_SUITE_P(Kinds, GpuLseGradient,
                         testing::Combine(testing::Range<size_t>(0, shapes().size()),
                                          testing::Range<size_t>(0, std::size(kBackward))),
                         [](const auto& info) {
                           return std::string(shapes()[std::get<0>(info.param)].name) + '_' +
                                  name_of(kBackward[std::get<1>(info.param)]);
                         });

// A gradient of lse that is far larger or smaller than what do brings, everywhere or at a token that no sample shows,
// and alone.
TEST(GpuLseGradientMagnitudes, leave_no_format) {
  for (const int64_t dim : {64, 96, 128, 192, 256}) {
    Case c{.name = "magnitudes",
           .heads = 2,
           .kv_heads = 1,
           .tokens_q = 300,
           .tokens_k = 260,
           .dim = dim,
           .dim_v = dim,
           .dtype = DType::bf16,
           .out_dtype = DType::f32};
    const Inputs drawn = draw(c, 5);
    const Bars bars = bars_of(c, drawn, {Precision::bf16});
    struct Magnitude {
      const char* name;
      double do_, dlse, at_token_1;
    };
    for (const auto& [label, of_do, of_dlse, at_token_1] : {Magnitude{"alone", 0, 1, 1},
                                                            {"alone_huge", 0, 0x1p60, 1},
                                                            {"alone_tiny", 0, 0x1p-60, 1},
                                                            {"large", 1, 0x1p20, 1},
                                                            {"small", 1, 0x1p-20, 1},
                                                            {"hidden", 1, 1, 0x1p12}})
      for (const bool deterministic : {false, true}) {
        SCOPED_TRACE(testing::Message() << dim << ' ' << label << ", deterministic " << deterministic);
        Inputs in = drawn;
        for (double& x : in.do_.data) x *= of_do;
        Values dlse = rounded(normal(c.lse_shape(), 6), DType::f32);
        for_each(c.lse_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t) {
          dlse.at(b, h, t, 0) *= t == 1 ? of_dlse * at_token_1 : of_dlse;
        });
        const Exact want = definition(c, in, {}, dlse);
        const Gradients got =
            backward(c, in, attention_for(c, {Precision::bf16, BiasCorrection::f16, deterministic}), want, {}, dlse);
        expect_within("dq", got.dq, want.dq, bars.dq);
        expect_within("dk", got.dk, want.dk, bars.dk);
        if (of_do != 0) expect_within("dv", got.dv, want.dv, bars.dv);
      }
  }
}

// The same bits in every run, and where another batch element is added, also in dsinks.
// Sinks of each batch element have gradients of each, also where they are one tensor in memory. So they cannot run with
// a key mask as packed sequences, which are one batch element.
TEST(GpuDsinks, of_batch_elements_are_apart_beside_a_key_mask) {
  const Case c{.name = "",
               .batch = 2,
               .heads = 2,
               .kv_heads = 2,
               .tokens_q = 530,
               .tokens_k = 70,
               .mask = MaskTensor::padding,
               .dtype = DType::bf16,
               .layout = Layout::bthd,
               .kv_layout = Layout::bthd,
               .sinks = Sinks::of_batch};
  Inputs in = draw(c, 1);
  for (int64_t h = 0; h < c.heads; ++h) in.sinks.at(1, h, 0, 0) = in.sinks.at(0, h, 0, 0);
  const Attention attention = attention_of(c, Precision::bf16, gpu_backend());
  const auto pass = [&](Pass which, const Outputs* saved) {
    GpuPlace place;
    return run(c, in, attention, which, saved, &place);
  };
  for (const bool repeat : {false, true}) {
    SCOPED_TRACE(repeat);
    in.sinks_repeat = repeat;
    if (!gpu_takes_logits(c, Pass::forward, attention, in.mask_dtype, in.mask.shape)) {
      EXPECT_THROW(pass(Pass::forward, nullptr), Error);
      continue;
    }
    const Outputs saved = pass(Pass::forward, nullptr), got = pass(Pass::backward, &saved);
    const Outputs want = exact(c, in, Pass::backward);
    for_each(c.sinks_shape(), [&](int64_t b, int64_t h, int64_t, int64_t) {
      EXPECT_NEAR(got.dsinks.at(b, h, 0, 0), want.dsinks.at(b, h, 0, 0), 0x1p-6 * largest(want.dsinks))
          << b << ' ' << h;
    });
  }
}

TEST(GpuDsinks, are_deterministic_and_written_without_queries) {
  Case c = shapes()[0].c;
  const Inputs in = draw(c, 9);
  const Values sinks = drawn_sinks(c, true, {5.25, 1, 7}), dlse = rounded(normal(c.lse_shape(), 4), DType::f32);
  const Exact saved = definition(c, in, sinks, dlse);
  const Attention attention = attention_for(c, {Precision::bf16});
  const Gradients first = backward(c, in, attention, saved, sinks, dlse);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(backward(c, in, attention, saved, sinks, dlse).dsinks.data, first.dsinks.data);
  for (const auto& [tokens_q, tokens_k] : {std::pair{0, 330}, {0, 0}, {230, 0}}) {
    c.tokens_q = tokens_q, c.tokens_k = tokens_k;
    const Inputs few = draw(c, 10);
    const Values of_lse = rounded(normal(c.lse_shape(), 4), DType::f32);
    const Exact want = definition(c, few, sinks, of_lse);
    const Gradients got = backward(c, few, attention, want, sinks, of_lse);
    EXPECT_LE(difference(got.dsinks, want.dsinks).rms, 1e-5 * difference(got.dsinks, want.dsinks).norm) << tokens_q;
  }
}

}  // namespace
}  // namespace octet::test
