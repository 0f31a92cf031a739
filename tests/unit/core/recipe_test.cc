// Each precision's passes and options are defined once: backends agree with it, and with each other's messages.
#include "core/recipe.h"

#include <gtest/gtest.h>

#include "core/backend.h"
#include "core/error.h"
#include "core/names.h"

namespace octet {
namespace {

constexpr octet_pass kPasses[] = {OCTET_FORWARD, OCTET_BACKWARD, OCTET_JVP};

// A problem as far as precision and pass are concerned.
Problem problem_of(octet_precision precision, octet_pass pass) {
  Problem p{};
  p.precision = precision, p.pass = pass, p.device = OCTET_CPU;
  p.batch = p.heads = p.kv_heads = p.tokens_q = p.tokens_k = 1, p.dim = p.dim_v = 64;
  p.o.dtype = OCTET_F32;
  return p;
}

const Backend& backend(const std::string& wanted) {
  for (const Backend* const& b : backends())
    if (b->name == wanted) return *b;
  throw std::runtime_error("no backend " + wanted);
}

TEST(Precisions, their_sets_are_listed_in_the_order_of_octet_h) {
  EXPECT_EQ(PrecisionSet{}.names(), "");
  EXPECT_EQ((PrecisionSet{OCTET_PRECISION_BF16, OCTET_PRECISION_F64}).names(), "f64, bf16");
  EXPECT_EQ(precisions_with_bias_correction().names(" and "), "f16 and bf16");
  EXPECT_EQ(precisions_with_int8_options().names(" and "), "int8, int8_f16 and int8_fp8");
  EXPECT_EQ(precisions_with_e4m3_outputs().names(), "f64, fp8_raw");
  const PrecisionSet both = PrecisionSet{OCTET_PRECISION_F32} | PrecisionSet{OCTET_PRECISION_SAGEBWD};
  EXPECT_EQ(both.names(), "f32, sagebwd");
  EXPECT_FALSE(both.has(OCTET_PRECISION_F16));
}

TEST(Precisions, both_backends_of_the_cpu_have_what_the_recipes_have) {
  int without = 0;
  for (int n = OCTET_PRECISION_F32; n <= kLastPrecision; ++n)
    for (const octet_pass pass : kPasses) {
      const auto precision = static_cast<octet_precision>(n);
      SCOPED_TRACE(std::string(name(precision)) + ' ' + name(pass));
      const Problem p = problem_of(precision, pass);
      const auto reason = unsupported_reason(p);
      EXPECT_EQ(!reason, supports(precision, pass));
      EXPECT_EQ(backend("cpu").plan(p, nullptr).reason, reason.value_or(""));
      EXPECT_EQ(backend("reference").plan(p, nullptr).reason, reason.value_or(""));
      EXPECT_TRUE(!reason || reason->starts_with(text("precision ", name(precision), " has no ", name(pass))))
          << *reason;
      without += reason.has_value();
    }
  EXPECT_EQ(without, 3 + 6) << "three precisions have no backward pass, six no jvp";
}

TEST(Precisions, bias_corrections_that_read_the_exact_output_ask_for_it) {
  for (int n = OCTET_PRECISION_F32; n <= kLastPrecision; ++n)
    for (int bias_correction = OCTET_BIAS_CORRECTION_F16; bias_correction <= OCTET_BIAS_CORRECTION_GPROJ;
         ++bias_correction) {
      Problem p = problem_of(static_cast<octet_precision>(n), OCTET_BACKWARD);
      if (!supports(p.precision, p.pass)) continue;
      p.bias_correction = static_cast<octet_bias_correction>(bias_correction), p.o.dtype = OCTET_BF16;
      const bool reads =
          (n == OCTET_PRECISION_F16 || n == OCTET_PRECISION_BF16) &&
          (bias_correction == OCTET_BIAS_CORRECTION_F16 || bias_correction == OCTET_BIAS_CORRECTION_EXACT_DELTA);
      EXPECT_EQ(missing_exact_output(p).has_value(), reads) << name(p.precision) << ' ' << name(p.bias_correction);
      p.o_residual.dtype = OCTET_BF16;
      EXPECT_EQ(missing_exact_output(p), std::nullopt);
    }
}

}  // namespace
}  // namespace octet
