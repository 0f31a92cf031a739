// smooth_q against float64 attention, beside the reference, on queries whose channels have means of their own in each
// block of 128.
#include <gtest/gtest.h>

#include <vector>

#include "gpu/place.h"
#include "support/cases.h"

namespace octet::test {
namespace {

struct Smoothed {
  Precision precision;
  Case c;
};

std::vector<Smoothed> smoothed() {
  const auto of = [](const char* name, const auto& change) {
    Case c{.name = name,
           .batch = 2,
           .heads = 4,
           .kv_heads = 2,
           .tokens_q = 300,
           .tokens_k = 210,
           .dtype = DType::bf16,
           .out_dtype = DType::f32};
    change(c);
    return c;
  };
  const auto dims = [](int64_t dim) { return [dim](Case& c) { c.dim = c.dim_v = dim; }; };
  const auto packed = [](Case& c) {
    c.batch = 1, c.cu_seqlens_q = {0, 37, 37, 300}, c.cu_seqlens_k = {0, 70, 81, 210}, c.causal = true;
    c.alignment = Alignment::bottom_right;
  };
  using enum Precision;
  return {{int8, of("int8", dims(64))},
          {int8, of("int8_128", dims(128))},
          {int8, of("int8_wide", dims(256))},
          {int8_f16, of("int8_f16", dims(64))},
          {int8_f16, of("int8_f16_128", dims(128))},
          {int8_f16, of("int8_f16_wide", dims(232))},
          {int8_fp8, of("int8_fp8_128", dims(128))},
          {int8, of("int8_packed", packed)},
          {int8_f16, of("int8_f16_packed", packed)},
          {int8_f16, of("few_queries", [](Case& c) { c.tokens_q = 3, c.tokens_k = 700; })},
          {int8, of("causal", [](Case& c) { c.causal = true, c.alignment = Alignment::bottom_right; })},
          {int8_f16, of("softcap", [](Case& c) { c.softcap = 3.f; })},
          {int8, of("blind_mask", [](Case& c) { c.mask = MaskTensor::blind; })},
          {int8_f16, of("bias_alibi", [](Case& c) { c.mask = MaskTensor::bias_bf16, c.alibi = Alibi::shared; })},
          {int8, of("strides", [](Case& c) { c.layout = c.kv_layout = Layout::padded, c.sinks = Sinks::shared; })}};
}

class GpuSmoothQ : public testing::TestWithParam<Smoothed> {};

TEST_P(GpuSmoothQ, errs_as_the_reference_does) {
  if (!tests_sm80()) GTEST_SKIP() << "this backend computes no smooth_q";
  const auto& [precision, c] = GetParam();
  Inputs in = draw(c, 31);
  for_each(in.q.shape, [&](int64_t b, int64_t h, int64_t t, int64_t i) {
    in.q.at(b, h, t, i) += 3.0 * ((t / 128 + i + h) % 4) - 4.5;
  });
  for_each(in.k.shape, [&](int64_t b, int64_t h, int64_t t, int64_t i) { in.k.at(b, h, t, i) += i % 3 - 1.0; });
  in.q = rounded(in.q, c.dtype), in.k = rounded(in.k, c.dtype);
  const auto answer = [&](const char* backend, Switch smooth_q) {
    Attention attention = attention_of(c, precision, backend);
    attention.smooth_q = smooth_q;
    GpuPlace place;
    return run(c, in, attention, Pass::forward, nullptr, std::string(backend) == "sm80" ? &place : nullptr);
  };
  const Outputs got = answer("sm80", Switch::on), plain = answer("reference", Switch::on),
                want = exact(c, in, Pass::forward), rough = answer("sm80", Switch::off);
  const Difference o = difference(got.o, want.o), of_plain = difference(plain.o, want.o);
  EXPECT_LE(o.rms, 2 * of_plain.rms) << text(o);
  EXPECT_LE(o.largest, 2 * of_plain.largest) << text(o);
  EXPECT_LT(o.rms, difference(rough.o, want.o).rms) << "it should err less than without smooth_q";
  const Difference lse = difference(got.lse, want.lse), of_plain_lse = difference(plain.lse, want.lse);
  EXPECT_LE(lse.rms, 2 * of_plain_lse.rms) << text(lse);
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuSmoothQ, testing::ValuesIn(smoothed()),
                         [](const testing::TestParamInfo<Smoothed>& info) { return std::string(info.param.c.name); });

}  // namespace
}  // namespace octet::test
