// Every pass on the GPU against float64, case by case: its error is at most twice that of unfused arithmetic which
// rounds at the same points (`plain`), plus what f32 sums may add (f32_noise). Tiles differ from the reference's, so P
// is rounded relative to other running maxima: the two are not compared with each other, and where nothing else is
// rounded (o in f32, and o + o_residual, of bf16 P), the bar has such a maximum too (o_of_shifted_p).
#include <gtest/gtest.h>
#include <octet/octet_study.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <octet/formats.hpp>
#include <utility>
#include <vector>

#include "gpu/place.h"
#include "support/cases.h"

namespace octet::test {
namespace {

struct Compared {
  const char* name;
  const Values *got, *plain, *exact;
  double rms_noise, largest_noise;
};

void expect_as_good(const Compared& x) {
  if (x.exact->data.empty()) return;
  const Difference got = difference(*x.got, *x.exact), plain = difference(*x.plain, *x.exact);
  EXPECT_LE(got.rms, 2 * plain.rms + x.rms_noise) << x.name << ": rms error, plain rounding " << plain.rms
                                                  << ", f32 noise " << x.rms_noise << "; worst " << text(got) << "\n";
  EXPECT_LE(got.largest, 2 * plain.largest + x.largest_noise)
      << x.name << ": largest error, plain rounding " << plain.largest << ", f32 noise " << x.largest_noise << "; "
      << text(got) << "\n";
}

// The cases that all backends share, and heads for which the GPU has kernels of their own.
const std::vector<Case>& gpu_cases() {
  static const std::vector<Case> all = [] {
    // Gradients of masks come last: seeds count cases.
    std::vector<Case> list = cases(), of_masks;
    std::ranges::copy_if(list, std::back_inserter(of_masks), &Case::dmask);
    std::erase_if(list, [](const Case& c) { return c.dmask; });
    Case wide{.name = "wide_heads",
              .heads = 4,
              .kv_heads = 2,
              .tokens_q = 150,
              .tokens_k = 210,
              .dim = 256,
              .dim_v = 256,
              .dtype = DType::bf16,
              .out_dtype = DType::bf16};
    list.push_back(wide);
    wide.name = "wide_heads_causal", wide.causal = true, wide.alignment = Alignment::bottom_right;
    list.push_back(wide);
    wide.name = "wide_heads_192_128", wide.dim = 192, wide.dim_v = 128;
    list.push_back(wide);
    wide.name = "wide_heads_136_232_window", wide.dim = 136, wide.dim_v = 232, wide.causal = false,
    wide.window = {{70, 20}};
    list.push_back(wide);
    // Every head dim that kernels have, and those just below it; rows that TMA reads in place, with NaN after them.
    for (const auto& [name, dim, dim_v] : {std::tuple{"dims_72_80", 72, 80},
                                           {"dims_80_72", 80, 72},
                                           {"dims_88_96", 88, 96},
                                           {"dims_96_24", 96, 24},
                                           {"dims_160_152", 160, 152},
                                           {"dims_128_160", 128, 160},
                                           {"dims_168_104", 168, 104},
                                           {"dims_192_192", 192, 192},
                                           {"dims_64_184", 64, 184}}) {
      Case c{.name = name,
             .batch = 2,
             .heads = 4,
             .kv_heads = 2,
             .tokens_q = 400,
             .tokens_k = 470,
             .dim = dim,
             .dim_v = dim_v,
             .causal = true,
             .alignment = Alignment::bottom_right,
             .dtype = DType::bf16,
             .out_dtype = DType::bf16,
             .layout = Layout::spaced,
             .kv_layout = Layout::spaced};
      list.push_back(c);
    }
    // More keys than the tensor cores add up in 8 bits before sums are put aside.
    Case long_rows{.name = "many_keys",
                   .heads = 2,
                   .kv_heads = 1,
                   .tokens_q = 70,
                   .tokens_k = 5300,
                   .dim = 128,
                   .dim_v = 128,
                   .dtype = DType::bf16,
                   .out_dtype = DType::bf16};
    list.push_back(long_rows);
    long_rows.name = "many_keys_64", long_rows.dim = long_rows.dim_v = 64;
    list.push_back(long_rows);
    // 33 x 4 blocks of 192 queries for 132 multiprocessors, and then shorter ones in 8 bits.
    long_rows.name = "many_queries", long_rows.heads = 33, long_rows.tokens_q = 896, long_rows.tokens_k = 40;
    list.push_back(long_rows);
    Case dropout = wide;
    dropout.name = "wide_heads_dropout", dropout.dropout_p = .3;
    list.push_back(dropout);
    // Without dropout sm80 too would copy its seen keys side by side.
    list.push_back({.name = "padding_dropout",
                    .batch = 2,
                    .heads = 2,
                    .kv_heads = 1,
                    .tokens_q = 530,
                    .tokens_k = 90,
                    .dim = 64,
                    .dim_v = 64,
                    .mask = MaskTensor::padding,
                    .dtype = DType::bf16,
                    .out_dtype = DType::bf16,
                    .layout = Layout::bthd,
                    .kv_layout = Layout::bthd,
                    .dropout_p = .1});
    // int8's passes for training, of which the forward one writes o_residual, with masks that are read where they are.
    for (const auto& [name, mask] : {std::pair{"padding_residual", MaskTensor::padding},
                                     {"keys_residual", MaskTensor::keys},
                                     {"bias_residual", MaskTensor::bias_bf16}})
      list.push_back({.name = name,
                      .batch = 2,
                      .heads = 4,
                      .kv_heads = 2,
                      .tokens_q = 70,
                      .tokens_k = 150,
                      .mask = mask,
                      .dtype = DType::bf16,
                      .out_dtype = DType::bf16});
    // Inputs of e4m3 at the other head dims that have quantizers of their own.
    for (const auto& [name, dim] : {std::pair{"e4m3_128", 128}, {"e4m3_256", 256}}) {
      Case c{.name = name,
             .heads = 4,
             .kv_heads = 2,
             .tokens_q = 100,
             .tokens_k = 150,
             .dim = dim,
             .dim_v = dim,
             .causal = true,
             .alignment = Alignment::bottom_right,
             .dtype = DType::e4m3};
      list.push_back(c);
    }
    list.insert(list.end(), of_masks.begin(), of_masks.end());
    // Rows of a mask that start at multiples of 16 bytes, at each size of tiles; the last tiles are not whole.
    Case aligned{.name = "dmask_heads",
                 .batch = 3,
                 .heads = 4,
                 .kv_heads = 2,
                 .tokens_q = 150,
                 .tokens_k = 264,
                 .mask = MaskTensor::bias_bf16,
                 .dtype = DType::bf16,
                 .out_dtype = DType::bf16,
                 .dmask = true};
    list.push_back(aligned);
    aligned.name = "dmask_batch", aligned.mask = MaskTensor::bias_f32, aligned.causal = true,
    aligned.alignment = Alignment::bottom_right;
    list.push_back(aligned);
    aligned.name = "dmask_128", aligned.dim = aligned.dim_v = 128;
    list.push_back(aligned);
    aligned.name = "dmask_wide", aligned.dim = 256, aligned.dim_v = 200, aligned.tokens_k = 200;
    list.push_back(aligned);
    aligned.name = "dmask_wide_terms", aligned.softcap = 2, aligned.dropout_p = .2;
    list.push_back(aligned);
    // Warpgroups of two tiles of queries, and rings of a mask's tiles that are passed through more than once.
    list.push_back({.name = "bias_many_tiles",
                    .batch = 2,
                    .heads = 4,
                    .kv_heads = 2,
                    .tokens_q = 450,
                    .tokens_k = 648,
                    .mask = MaskTensor::bias_bf16,
                    .dtype = DType::bf16,
                    .out_dtype = DType::bf16,
                    .dlse = true});
    // Cross-attention over a text: Hopper has kernels of a single, ragged tile of keys at these head dims.
    for (const auto& [name, dim, dim_v] : {std::tuple{"text_64", 64, 40}, {"text_80", 80, 72}, {"text_128", 128, 128}})
      list.push_back({.name = name,
                      .batch = 2,
                      .heads = 4,
                      .kv_heads = 2,
                      .tokens_q = 410,
                      .tokens_k = 77,
                      .dim = dim,
                      .dim_v = dim_v,
                      .dtype = DType::bf16,
                      .out_dtype = DType::bf16,
                      .layout = Layout::bthd,
                      .kv_layout = Layout::bthd,
                      .sinks = Sinks::shared});
    // Dropout counts keys by their places, and Hopper's kernels have packed the seen ones.
    for (const auto& [name, mask, dim] : {std::tuple{"padding_places", MaskTensor::padding, 128},
                                          {"left_padding_places", MaskTensor::left_padding, 64},
                                          {"keys_places", MaskTensor::keys, 64}})
      list.push_back({.name = name,
                      .batch = 3,
                      .heads = 4,
                      .kv_heads = 2,
                      .tokens_q = 140,
                      .tokens_k = 423,
                      .dim = dim,
                      .dim_v = dim - 8,
                      .mask = mask,
                      .dtype = DType::bf16,
                      .out_dtype = DType::bf16,
                      .layout = Layout::bthd,
                      .kv_layout = Layout::bthd,
                      .sinks = Sinks::shared,
                      .dlse = true,
                      .dropout_p = .2,
                      .seeds = mask == MaskTensor::padding ? Seeds::shared : Seeds::each});
    // A mask that no query reads.
    for (const auto& [name, mask] :
         {std::pair{"no_queries_padding", MaskTensor::padding}, {"no_queries_bias", MaskTensor::bias_bf16}})
      list.push_back({.name = name,
                      .batch = 2,
                      .heads = 2,
                      .kv_heads = 2,
                      .tokens_q = 0,
                      .tokens_k = 70,
                      .mask = mask,
                      .dtype = DType::bf16,
                      .out_dtype = DType::bf16});
    return list;
  }();
  return all;
}

struct Kind {
  Pass pass;
  Precision precision;
  BiasCorrection bias_correction = BiasCorrection::f16;
  bool deterministic = false;
  bool offset = false;    // v has one in each channel
  bool training = false;  // int8: the forward pass for training

  bool sixteen_bits() const { return precision == Precision::bf16 || precision == Precision::f16; }
  bool reads_e4m3() const { return !sixteen_bits() && precision != Precision::f32; }
};

bool supported(const Case& c, const Inputs& in, const Kind& kind) {
  const bool int8_backward = kind.precision == Precision::int8 && kind.pass == Pass::backward;
  const bool training = int8_backward || (kind.precision == Precision::sagebwd && kind.pass == Pass::backward) ||
                        (kind.training && c.has_residual());
  const bool dims = std::max(c.dim, c.dim_v) <= (training ? 128 : gpu_most_dim(kind.precision, kind.pass));
  // Without o_residual the forward pass for training is the other one, and there is no backward pass.
  if (int8_backward && !c.has_residual()) return false;
  if (kind.training && c.has_residual() && !tests_sm80()) return false;
  if (c.dropout_p != 0 && kind.training && c.has_residual()) return false;
  const Attention attention{
      .precision = kind.precision, .bias_correction = kind.bias_correction, .deterministic = kind.deterministic};
  if (!gpu_takes_extras(c, kind.pass, attention)) return false;
  if (c.dmask && kind.pass == Pass::backward && !gpu_gives_dmask(kind.precision)) return false;
  return gpu_computes(kind.pass, kind.precision) &&
         gpu_takes_logits(c, kind.pass, attention, in.mask_dtype, in.mask.shape) &&
         (c.dtype != DType::e4m3 || kind.reads_e4m3() || gpu_takes_e4m3_as_numbers()) && dims;
}

// What tensor cores lose of a logit of e4m3 numbers, at `sigmas`. They add up 32 products and what they had by then in
// fixed point: each of the 33 terms is cut off 13 bits below the largest one. (An integer model of this gives what they
// give, to within 5 % of what they lose, for sums of 1024 products.)
double e4m3_logit_noise(const Case& c, const Inputs& in, double sigmas) {
  const double steps = std::ceil(static_cast<double>(c.dim) / 32);
  return sigmas * c.effective_scale() * 0x1p-13 * largest(in.q) * largest(in.k) * std::sqrt(steps * 33 / 3);
}

constexpr Kind kKinds[] = {{Pass::forward, Precision::bf16, BiasCorrection::f16},
                           {Pass::forward, Precision::bf16, BiasCorrection::f16, false, true},
                           {Pass::forward, Precision::bf16, BiasCorrection::none},
                           {Pass::forward, Precision::f16, BiasCorrection::f16},
                           {Pass::backward, Precision::bf16, BiasCorrection::f16},
                           {Pass::backward, Precision::bf16, BiasCorrection::none},
                           {Pass::backward, Precision::bf16, BiasCorrection::exact_delta},
                           {Pass::backward, Precision::f16, BiasCorrection::f16},
                           {Pass::backward, Precision::bf16, BiasCorrection::f16, true},
                           {Pass::backward, Precision::bf16, BiasCorrection::exact_delta, true},
                           {Pass::forward, Precision::bf16, BiasCorrection::beta},
                           {Pass::forward, Precision::f16, BiasCorrection::beta},
                           {Pass::backward, Precision::bf16, BiasCorrection::beta},
                           {Pass::jvp, Precision::bf16},
                           {Pass::jvp, Precision::f16},
                           {Pass::forward, Precision::f32},
                           {Pass::backward, Precision::f32},
                           {Pass::jvp, Precision::f32},
                           {Pass::forward, Precision::int8},
                           {Pass::forward, Precision::int8, BiasCorrection::f16, false, false, true},
                           {Pass::backward, Precision::int8},
                           {Pass::backward, Precision::int8, BiasCorrection::f16, true},
                           {Pass::forward, Precision::int8_f16},
                           {Pass::forward, Precision::int8_fp8},
                           {Pass::forward, Precision::fp8},
                           {Pass::forward, Precision::fp8_raw},
                           {Pass::forward, Precision::sagebwd},
                           {Pass::backward, Precision::sagebwd},
                           {Pass::backward, Precision::sagebwd, BiasCorrection::f16, true}};

// o in f32 where P is rounded to bf16 against a maximum that is not the row's own, and summed before: what kernels
// compute that keep a stale maximum, but for its choice (docs/numerics.md). The largest P of a row, which over its own
// maximum is exactly 1, is then rounded like all others. Any shift does; this one is half of the largest logit.
Values o_of_shifted_p(Case c, const Inputs& in) {
  c.out_dtype = DType::f32;
  octet_rounding points = OCTET_ROUNDING_INIT;
  points.p = OCTET_BF16, points.l_from_p = 0, points.tile = 0;
  points.beta = 1.5f, points.tie_epsilon = 1e30f;  // all logits count as ties, which shift the maximum
  Attention shifted = attention_of(c, Precision::f64, "reference");
  shifted.rounding = &points;
  return run(c, in, shifted, Pass::forward).o;
}

// The numbers nearest to `exact` that the format rounds to those stored. How far they are off is what arithmetic alone
// explains: by which of its neighbours a number in 16 bits is stored, a small error can decide.
Values before_rounding(const Values& stored, const Values& exact, const Format& format) {
  Values found = exact;
  for (size_t i = 0; i < stored.data.size(); ++i) {
    const int exponent = stored.data[i] == 0.0 ? format.min_exponent : std::ilogb(stored.data[i]);
    const double half_step = std::ldexp(0.5, std::max(exponent, format.min_exponent) - format.mantissa_bits);
    found.data[i] = std::clamp(exact.data[i], stored.data[i] - half_step, stored.data[i] + half_step);
  }
  return found;
}

// Plain rounding of the same attention with its keys the other way round. Kernels of sm80 take keys from the last to
// the first, so that P of e4m3, which l sums once it is rounded, are rounded against other maxima than the reference's.
Outputs with_reversed_keys(const Case& c, const Inputs& in, const Attention& plain) {
  Inputs reversed = in;
  for (const auto& [from, to] : {std::pair{&in.k, &reversed.k}, {&in.v, &reversed.v}})
    for_each(from->shape, [&, from = from, to = to](int64_t b, int64_t h, int64_t t, int64_t i) {
      to->at(b, h, t, i) = from->at(b, h, c.tokens_k - 1 - t, i);
    });
  return run(c, reversed, plain, Pass::forward);
}
bool can_reverse_keys(const Case& c, const Inputs& in) {
  return !c.causal && !c.window && c.cu_seqlens_k.empty() && c.alibi == Alibi::none && in.mask.data.empty();
}

enum class TilesToRun { default_one, others };

// Runs a case with the kernel of a tile, or with each of those that are not the default.
void expect_errors_of_plain_rounding(size_t index, const Kind& kind, TilesToRun tiles_to_run) {
  Case c = gpu_cases()[index];
  const auto [pass, precision, bias_correction, deterministic, offset, training] = kind;
  c.trains_int8 = training || pass == Pass::backward;
  const uint64_t seed = index + 1;
  SCOPED_TRACE(testing::Message() << "case " << c.name << ", " << name(pass) << ' ' << name(precision) << ", seed "
                                  << seed);
  Inputs in = draw(c, seed);
  if (offset)
    for_each(c.v_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t channel) {
      double& x = in.v.at(b, h, t, channel);
      x = round_to(kBf16, x + (channel % 3 - 1) * 8.0 * static_cast<double>(1 + h));
    });
  Attention plain = attention_of(c, precision, "reference"), gpu = attention_of(c, precision, gpu_backend());
  if (kind.sixteen_bits()) plain.bias_correction = gpu.bias_correction = bias_correction;
  gpu.deterministic = deterministic;
  const bool runs = supported(c, in, kind);
  std::vector<std::string> others;
  if (tiles_to_run == TilesToRun::others) {
    GpuPlace place;
    if (runs) others = tiles_of(c, in, gpu, pass, &place);
    if (others.size() < 2) return;
  } else if (!runs) {
    const Outputs nothing = exact(c, in, Pass::forward);
    GpuPlace place;
    EXPECT_THROW(run(c, in, gpu, pass, &nothing, &place), Error);
    return;
  }
  const Outputs want = exact(c, in, pass);
  const double column_sum = pass == Pass::backward ? largest_column_sum(c, in) : 0.0;
  Noise rms = f32_noise(c, in, column_sum, 1.0), most = f32_noise(c, in, column_sum, 5.0);
  if (precision == Precision::fp8 || precision == Precision::fp8_raw)
    for (const auto& [noise, sigmas] : {std::pair{&rms, 1.0}, {&most, 5.0}}) {
      const double logit = e4m3_logit_noise(c, in, sigmas);
      noise->o += 2 * logit * largest(in.v), noise->lse += logit;
    }
  Outputs saved;
  if (pass == Pass::backward) saved = run(c, in, plain, Pass::forward);
  const Outputs expected = run(c, in, plain, pass, &saved);
  const auto expect_errors_of = [&](const Outputs& got) {
    if (pass == Pass::backward) {
      expect_as_good({"dq", &got.dq, &expected.dq, &want.dq, rms.dq, most.dq});
      expect_as_good({"dk", &got.dk, &expected.dk, &want.dk, rms.dk, most.dk});
      expect_as_good({"dv", &got.dv, &expected.dv, &want.dv, rms.dv, most.dv});
      if (got.dsinks.present())
        expect_as_good({"dsinks", &got.dsinks, &expected.dsinks, &want.dsinks, rms.dsinks, most.dsinks});
      if (got.dmask.present())
        expect_as_good({"dmask", &got.dmask, &expected.dmask, &want.dmask, rms.dmask, most.dmask});
      return;
    }
    // Kernels may round P to bf16 against either maximum, which shows in an o that is not rounded.
    const bool either_maximum =
        precision == Precision::bf16 && bias_correction == BiasCorrection::none && pass == Pass::forward;
    const auto worse_of_both = [&](const Values& expected_o) {
      const Values shifted = o_of_shifted_p(c, in);
      return difference(shifted, want.o).largest > difference(expected_o, want.o).largest ? shifted : expected_o;
    };
    if (either_maximum) {
      Case unrounded = c;
      unrounded.out_dtype = DType::f32;
      const Values plain_o = worse_of_both(run(unrounded, in, plain, pass).o);
      const Format& format = c.out_dtype == DType::f32 ? kF32 : c.out_dtype == DType::f16 ? kF16 : kBf16;
      const Values got_o = before_rounding(got.o, want.o, format);
      expect_as_good({"o", &got_o, &plain_o, &want.o, rms.o, most.o});
    } else {
      expect_as_good({"o", &got.o, &expected.o, &want.o, rms.o, most.o});
    }
    Values plain_lse = expected.lse;
    const bool p_is_e4m3 = precision == Precision::int8_fp8 || precision == Precision::fp8;
    if (tests_sm80() && p_is_e4m3 && can_reverse_keys(c, in)) {
      const Values reversed = with_reversed_keys(c, in, plain).lse;
      if (difference(reversed, want.lse).largest > difference(plain_lse, want.lse).largest) plain_lse = reversed;
    }
    expect_as_good({"lse", &got.lse, &plain_lse, &want.lse, rms.lse, most.lse});
    if (pass == Pass::jvp) {
      expect_as_good({"to", &got.to, &expected.to, &want.to, rms.to, most.to});
      if (got.tlse.present()) expect_as_good({"tlse", &got.tlse, &expected.tlse, &want.tlse, rms.tlse, most.tlse});
    }
    if (!got.o_residual.present()) return;
    const Values got_o = combined(1, got.o, 1, got.o_residual);
    Values expected_o = combined(1, expected.o, 1, expected.o_residual);
    if (either_maximum) expected_o = worse_of_both(expected_o);
    expect_as_good({"o + o_residual", &got_o, &expected_o, &want.o, rms.o, most.o});
  };
  if (tiles_to_run == TilesToRun::default_one) {
    GpuPlace place;
    expect_errors_of(run(c, in, gpu, pass, &saved, &place));
    return;
  }
  for (auto tile = others.begin() + 1; tile != others.end(); ++tile) {
    SCOPED_TRACE("tile " + *tile);
    Attention with_tile = gpu;
    with_tile.tile = tile->c_str();
    GpuPlace place;
    expect_errors_of(run(c, in, with_tile, pass, &saved, &place));
  }
}

class GpuPasses : public testing::TestWithParam<std::tuple<size_t, size_t>> {};

TEST_P(GpuPasses, err_at_most_twice_as_much_as_plain_rounding) {
  const auto [index, which] = GetParam();
  expect_errors_of_plain_rounding(index, kKinds[which], TilesToRun::default_one);
}

class GpuTiles : public testing::TestWithParam<std::tuple<size_t, size_t>> {};

TEST_P(GpuTiles, err_at_most_twice_as_much_as_plain_rounding) {
  const auto [index, which] = GetParam();
  expect_errors_of_plain_rounding(index, kKinds[which], TilesToRun::others);
}

std::string name_of_parameter(const testing::TestParamInfo<std::tuple<size_t, size_t>>& info) {
  const Kind& kind = kKinds[std::get<1>(info.param)];
  return std::string(gpu_cases()[std::get<0>(info.param)].name) + '_' + name(kind.pass) + '_' + name(kind.precision) +
         suffix_of(kind.bias_correction) + (kind.deterministic ? "_deterministic" : "") +
         (kind.offset ? "_offset" : "") + (kind.training ? "_training" : "");
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuPasses,
                         testing::Combine(testing::Range<size_t>(0, gpu_cases().size()),
                                          testing::Range<size_t>(0, std::size(kKinds))),
                         name_of_parameter);
INSTANTIATE_TEST_SUITE_P(Cases, GpuTiles,
                         testing::Combine(testing::Range<size_t>(0, gpu_cases().size()),
                                          testing::Range<size_t>(0, std::size(kKinds))),
                         name_of_parameter);

// An o of e4m3 and its residual are o to 2^-11 in bytes, whose unit this is, to 2^-8 in e4m3, and to half of the
// smallest number where o is below the smallest normal one.
TEST(GpuE4m3Outputs, have_residuals) {
  for (const int64_t queries : {50, 51}) {  // the residual in e4m3 and in bytes
    Case c{.name = "e4m3_outputs", .heads = 2, .tokens_q = queries, .tokens_k = 90};
    const Inputs in = draw(c, 1);
    const Attention gpu = attention_of(c, Precision::fp8_raw, gpu_backend());
    GpuPlace place, other;
    const Values exact = run(c, in, gpu, Pass::forward, nullptr, &place).o;
    c.out_dtype = DType::e4m3;
    const Outputs got = run(c, in, gpu, Pass::forward, nullptr, &other);
    ASSERT_TRUE(got.o_residual.present());
    const double relative = c.residual_dtype() == DType::i8 ? 0x1p-11 : 0x1p-8;
    for (size_t i = 0; i < exact.data.size(); ++i) {
      const double x = exact.data[i], o = got.o.data[i];
      EXPECT_EQ(o, round_to(kE4m3, x));
      ASSERT_LE(std::fabs(o + got.o_residual.data[i] - x), std::max(relative * std::fabs(x), 0x1p-10)) << i;
    }
  }
}

// Where all keys lie in one step (of 61 keys, or of 32 with P of e4m3 in sm80), the GPU and the oracle round the same
// numbers on the same scales: what they differ by are codes at the boundary between two, which float32 sums and
// exponentials move, far fewer than codes that are rounded. Hopper's sums of e4m3 products have 13 bits
// (e4m3_logit_noise), which at fp8 moves up to 3 in 1000 of the codes of p by a whole unit: a tenth of what rounding
// all of them errs, in a model of the oracle with such sums. In a block of sagebwd one number of bf16 in a thousand is
// half of the largest, exactly between two codes, and is rounded as float32 or float64 happens to divide: a tenth of
// what rounding all of them errs. It gets f32 alone.
class GpuCodes : public testing::TestWithParam<Precision> {};

TEST_P(GpuCodes, are_those_of_the_oracle) {
  if (!gpu_computes(Pass::forward, GetParam())) GTEST_SKIP() << "this backend computes no " << name(GetParam());
  const bool p_is_e4m3 =
      GetParam() != Precision::int8 && GetParam() != Precision::int8_f16 && GetParam() != Precision::sagebwd;
  std::vector<int64_t> dims = {64, 128, 40, 96};
  if (gpu_most_dim(GetParam()) == 256) dims.insert(dims.end(), {192, 256});
  for (const int64_t dim : dims)
    for (const DType dtype : {DType::bf16, DType::f32}) {
      if (GetParam() == Precision::sagebwd && dtype == DType::bf16) continue;
      const Case c{.name = "one_step",
                   .batch = 2,
                   .heads = 4,
                   .kv_heads = 2,
                   .tokens_q = 150,
                   .tokens_k = tests_sm80() && p_is_e4m3 ? 32 : 61,
                   .dim = dim,
                   .dim_v = dim,
                   .dtype = dtype};
      const uint64_t seed = 77 + static_cast<uint64_t>(dim);
      SCOPED_TRACE(testing::Message() << "dim " << dim << ", dtype " << static_cast<int>(dtype) << ", seed " << seed);
      const Inputs in = draw(c, seed);
      const Outputs want = run(c, in, attention_of(c, GetParam(), "reference"), Pass::forward);
      GpuPlace place;
      const Outputs got = run(c, in, attention_of(c, GetParam(), gpu_backend()), Pass::forward, nullptr, &place);
      const Outputs unrounded = exact(c, in, Pass::forward);
      const double apart = difference(got.o, want.o).rms, recipe = difference(want.o, unrounded.o).rms;
      const double share = GetParam() == Precision::fp8 ? .2 : .1;
      EXPECT_LE(apart, share * recipe) << text(difference(got.o, want.o)) << ", the recipe errs " << recipe;
      const double lse_apart = difference(got.lse, want.lse).rms, lse_recipe = difference(want.lse, unrounded.lse).rms;
      EXPECT_LE(lse_apart, share * lse_recipe)
          << text(difference(got.lse, want.lse)) << ", the recipe errs " << lse_recipe;
    }
}

INSTANTIATE_TEST_SUITE_P(Precisions, GpuCodes,
                         testing::Values(Precision::int8, Precision::int8_f16, Precision::int8_fp8, Precision::fp8,
                                         Precision::fp8_raw, Precision::sagebwd),
                         [](const auto& info) { return std::string(name(info.param)); });

}  // namespace
}  // namespace octet::test
