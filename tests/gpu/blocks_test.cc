// Gradients at sagebwd, whose P and ds have a scale for each 64 queries and 64 keys, against the oracle of the recipe:
// both round the same numbers on the same scales. What they differ by are integers at the boundary between two, which
// float32 moves, far fewer than those that are rounded.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu/place.h"
#include "support/cases.h"

namespace octet::test {
namespace {

// Inputs are f32: half of the largest bf16 number of a block lies exactly between two integers.
std::vector<Case> block_cases() {
  std::vector<Case> list;
  const auto add = [&](const char* name) -> Case& {
    list.push_back(
        {.name = name, .batch = 2, .heads = 4, .kv_heads = 2, .tokens_q = 150, .tokens_k = 100, .dtype = DType::f32});
    return list.back();
  };
  const auto square = [](Case& c) { c.causal = true, c.tokens_k = c.tokens_q, c.alignment = Alignment::bottom_right; };
  add("full");
  square(add("causal"));
  // dq gets the mean of k times the sums of the rows of ds: found before the kernel, or by it.
  Case& sinks = add("sinks_and_dlse");
  sinks.sinks = Sinks::shared, sinks.dlse = true;
  add("softcap").softcap = 2.f;
  Case& biased = add("sinks_beside_alibi");
  square(biased), biased.sinks = Sinks::shared, biased.alibi = Alibi::shared;
  add("mask_f32").mask = MaskTensor::bias_f32;
  add("mask_bf16").mask = MaskTensor::bias_bf16;
  Case& packed = add("packed");
  packed.batch = 1, packed.cu_seqlens_q = {0, 70, 81, 150}, packed.cu_seqlens_k = {0, 3, 3, 100};
  packed.dlse = true;
  return list;
}

class GpuBlocks : public testing::TestWithParam<Case> {};

TEST_P(GpuBlocks, have_the_gradients_of_the_oracle) {
  if (!gpu_computes(Pass::backward, Precision::sagebwd)) GTEST_SKIP() << "this backend computes no sagebwd";
  for (const int64_t dim : {64, 128, 40, 96})
    for (const bool deterministic : {false, true}) {
      Case c = GetParam();
      c.dim = c.dim_v = dim;
      SCOPED_TRACE(testing::Message() << "dim " << dim << ", deterministic " << deterministic);
      Inputs in = draw(c, 90 + static_cast<uint64_t>(dim));
      for_each(c.k_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t i) { in.k.at(b, h, t, i) += i % 3 - 1.0; });
      in.k = rounded(in.k, c.dtype);
      in.do_ = rounded(in.do_, DType::f16);  // kernels take delta from do as it came
      // Rows with biases of 16 and more get an lse of q and k that are not rounded.
      for (double& slope : in.alibi_slopes.data) slope /= 4;
      const Attention oracle = attention_of(c, Precision::sagebwd, "reference");
      const Outputs saved = run(c, in, oracle, Pass::forward), want = run(c, in, oracle, Pass::backward, &saved),
                    unrounded = exact(c, in, Pass::backward);
      Attention gpu = attention_of(c, Precision::sagebwd, gpu_backend());
      gpu.deterministic = deterministic;
      GpuPlace place;
      const Outputs got = run(c, in, gpu, Pass::backward, &saved, &place);
      for (const auto& [name, gradient] : {std::pair{"dq", &Outputs::dq}, {"dk", &Outputs::dk}, {"dv", &Outputs::dv}}) {
        const double apart = difference(got.*gradient, want.*gradient).rms,
                     recipe = difference(want.*gradient, unrounded.*gradient).rms;
        EXPECT_LE(apart, .1 * recipe) << name << ": " << text(difference(got.*gradient, want.*gradient))
                                      << ", the recipe errs " << recipe;
      }
    }
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuBlocks, testing::ValuesIn(block_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace octet::test
