// Keys that a mask tensor hides from all queries cost the others no bits: neither means nor scales of 8 bits count
// them. So a call has the codes, and but for float32 the results, of a call without these keys.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "gpu/place.h"
#include "support/cases.h"

namespace octet::test {
namespace {

constexpr double kHidden = -std::numeric_limits<double>::infinity();

struct Recipe {
  Precision precision;
  bool trains_int8 = false;
};
const std::vector<Recipe> kRecipes = gpu_kinds<Recipe>(Pass::forward, {{Precision::int8},
                                                                       {Precision::int8, true},
                                                                       {Precision::int8_f16},
                                                                       {Precision::int8_fp8},
                                                                       {Precision::fp8},
                                                                       {Precision::sagebwd}});

// A mask tensor in float32 that is the same for all heads and adds nothing to the keys of [first, last).
Inputs inputs_of(const Case& c, int64_t first, int64_t last) {
  Inputs in = draw(c, 1);
  // Beside their mean keys are small, so that a key of zeros is far from them.
  for_each(c.k_shape(),
           [&](int64_t b, int64_t h, int64_t t, int64_t i) { in.k.at(b, h, t, i) += 8.0 * (i % 3 - 1.0); });
  in.k = rounded(in.k, c.dtype);
  in.mask_dtype = DType::f32;
  in.mask = Values({1, 1, c.tokens_q, c.tokens_k});
  for_each(in.mask.shape, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    in.mask.at(b, h, i, j) = first <= j && j < last ? 0.0 : kHidden;
  });
  return in;
}

Case case_of(const Recipe& recipe) {
  const DType type = recipe.trains_int8 ? DType::f16 : DType::f32;
  return {.name = "hidden",
          .batch = 2,
          .heads = 4,
          .kv_heads = 2,
          .tokens_q = 70,
          .tokens_k = 150,
          .dtype = type,
          .out_dtype = type,
          .trains_int8 = recipe.trains_int8};
}

Outputs run_on_gpu(const Case& c, const Inputs& in, Precision precision, Pass pass, const Outputs* saved = nullptr) {
  GpuPlace place;
  return run(c, in, attention_of(c, precision, gpu_backend()), pass, saved, &place);
}

constexpr char kTakesNone[] = "this backend computes no mask tensors in 8 bits";

class GpuHiddenKeys : public testing::TestWithParam<Recipe> {};

// Part of a block of 64 keys is seen, and none of the next one.
TEST_P(GpuHiddenKeys, cost_the_others_no_bits) {
  if (!gpu_has_general_logits()) GTEST_SKIP() << kTakesNone;
  const Precision precision = GetParam().precision;
  const bool training = GetParam().trains_int8;
  const Case all = case_of(GetParam());
  Case seen = all;
  seen.tokens_k = 74;
  const Inputs in = inputs_of(all, 0, seen.tokens_k);
  Inputs left = in;
  left.k = slice(in.k, 2, 0, seen.tokens_k), left.v = slice(in.v, 2, 0, seen.tokens_k);
  left.mask = slice(in.mask, 3, 0, seen.tokens_k);
  const auto expect_alike = [&](const char* what, const Values& got, const Values& want, const Values& unrounded) {
    // Float32 moves a few numbers at the boundary between two codes of P, or between two of f16.
    const double of_output = training ? 0x1p-11 : 0.0;
    EXPECT_LE(difference(got, want).rms, .05 * difference(want, unrounded).rms + of_output)
        << what << ": " << text(difference(got, want)) << ", the recipe errs by " << difference(want, unrounded).rms;
  };
  const Outputs o = run_on_gpu(all, in, precision, Pass::forward),
                want_o = run_on_gpu(seen, left, precision, Pass::forward), exact_o = exact(seen, left, Pass::forward);
  expect_alike("o", o.o, want_o.o, exact_o.o), expect_alike("lse", o.lse, want_o.lse, exact_o.lse);
  if (!gpu_computes(Pass::backward, precision) || (precision == Precision::int8 && !training)) return;
  const Outputs got = run_on_gpu(all, in, precision, Pass::backward, &want_o),
                want = run_on_gpu(seen, left, precision, Pass::backward, &want_o),
                unrounded = exact(seen, left, Pass::backward);
  expect_alike("dq", got.dq, want.dq, unrounded.dq);
  expect_alike("dk", slice(got.dk, 2, 0, seen.tokens_k), want.dk, unrounded.dk);
  expect_alike("dv", slice(got.dv, 2, 0, seen.tokens_k), want.dv, unrounded.dv);
}

// A single key is its own mean, which no sample of the tokens may miss.
TEST(GpuOneKey, is_its_own_mean) {
  if (!gpu_has_general_logits()) GTEST_SKIP() << kTakesNone;
  for (const bool training : {false, true}) {
    const Case c = case_of({Precision::int8, training});
    const Inputs in = inputs_of(c, c.tokens_k - 1, c.tokens_k);
    const Outputs got = run_on_gpu(c, in, Precision::int8, Pass::forward), want = exact(c, in, Pass::forward);
    EXPECT_LE(difference(got.o, want.o).relative(), 0x1p-20) << text(difference(got.o, want.o));
  }
}

INSTANTIATE_TEST_SUITE_P(Recipes, GpuHiddenKeys, testing::ValuesIn(kRecipes), [](const auto& info) {
  return std::string(name(info.param.precision)) + (info.param.trains_int8 ? "_training" : "");
});

}  // namespace
}  // namespace octet::test
