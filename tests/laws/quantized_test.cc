// Types of inputs and outputs: numbers that several types hold give the same result in each; int8 codes from
// octet_quantize give what quantizing inside gives; fp8_raw writes e4m3.
#ifdef __x86_64__
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <limits>

#include "laws/laws.h"
#include "passes/prequantized.h"

namespace octet::test {
namespace {

class InputTypes : public EveryRecipe {};

TEST_P(InputTypes, that_hold_the_same_numbers_give_the_same_bits) {
  Case c{.name = "types", .heads = 4, .kv_heads = 2, .tokens_q = 100, .tokens_k = 130, .dtype = DType::e4m3};
  const Inputs in = draw(c, 1);
  c.dtype = DType::f32;
  const Outputs want = compute(c, in, GetParam());
  for (DType dtype : {DType::f16, DType::bf16, DType::e4m3}) {
    if (dtype == DType::e4m3 && GetParam().precision == Precision::fp8) continue;  // its own format: taken as it is
    c.dtype = dtype;
    expect_same_bits(compute(c, in, GetParam()), want, GetParam().pass,
                     "inputs of dtype " + std::to_string(static_cast<int>(dtype)));
  }
}

// Subnormal numbers of f16 are numbers too: real gradients are of 1e-6.
TEST_P(InputTypes, that_hold_the_same_subnormals_give_the_same_bits) {
  Case c{.name = "subnormals", .heads = 2, .kv_heads = 2, .tokens_q = 100, .tokens_k = 130, .dtype = DType::f16};
  Inputs in = draw(c, 2);
  for (Values* x : {&in.v, &in.do_, &in.tv}) *x = rounded(combined(0x1p-18, *x, 0, *x), c.dtype);
  const Outputs got = compute(c, in, GetParam());
  c.dtype = DType::f32;
  const Outputs want = compute(c, in, GetParam());
  expect_same_bits(got, want, GetParam().pass, "f16 against f32");
  if (GetParam().precision != Precision::fp8_raw) {  // e4m3 without scales has no such numbers
    EXPECT_GT(largest(want.o), 0.0);
  }
}

#ifdef __x86_64__
// XLA calls so, and torch after torch.set_flush_denormal(True).
TEST_P(InputTypes, keep_subnormals_where_the_caller_reads_them_as_0) {
  Case c{.name = "flushing", .heads = 2, .kv_heads = 2, .tokens_q = 40, .tokens_k = 70};
  for (const auto& [dtype, factor] : {std::pair{DType::f16, 0x1p-18}, {DType::e4m3, 0x1p-6}}) {
    c.dtype = dtype;
    Inputs in = draw(c, 3);
    for (Values* x : {&in.v, &in.do_, &in.tv}) *x = rounded(combined(factor, *x, 0, *x), c.dtype);
    const Outputs want = compute(c, in, GetParam());
    const unsigned saved = _mm_getcsr(), flushing = saved | 0x8040;  // results and operands
    _mm_setcsr(flushing);
    const Outputs got = compute(c, in, GetParam());
    const unsigned after = _mm_getcsr();
    _mm_setcsr(saved);
    EXPECT_EQ(after & 0xffc0, flushing & 0xffc0) << "the caller's own are back";
    expect_same_bits(got, want, GetParam().pass, "inputs of dtype " + std::to_string(static_cast<int>(dtype)));
  }
}
#endif

INSTANTIATE_TEST_SUITE_P(Recipes, InputTypes, testing::ValuesIn(every_recipe()), label);

constexpr Quantizing kSmooth{.smooth = true};

TEST(Codes, from_octet_quantize_give_the_same_bits) {
  const Case c{
      .name = "codes", .batch = 2, .heads = 4, .kv_heads = 2, .tokens_q = 100, .tokens_k = 130, .dtype = DType::bf16};
  const Inputs in = draw(c, 2);
  const Buffer q(in.q, DType::bf16), k(in.k, DType::bf16), v(in.v, DType::bf16);
  const Codes of_q(q, OCTET_OPERAND_Q, {}), of_k(k, OCTET_OPERAND_K, kSmooth), of_v(v, OCTET_OPERAND_V, kSmooth);
  const CodesArgument q8(of_q), k8(of_k), v8(of_v);
  const Buffer o(DType::f32, c.o_shape()), lse(DType::f32, c.lse_shape()), o8(DType::f32, c.o_shape()),
      lse8(DType::f32, c.lse_shape());
  const Attention attention{.precision = Precision::int8, .hadamard = Switch::off, .backend = "cpu"};
  run(attention, Forward{.q = q.view(), .k = k.view(), .v = v.view(), .o = o.view(), .lse = lse.view()});
  run(attention, Forward{.q = q8.tensor, .k = k8.tensor, .v = v8.tensor, .o = o8.view(), .lse = lse8.view()});
  expect_same_bits(o8.values(), o.values(), "o");
  // lse restores scale q.mean, where q is off by half a step per channel once it is quantized.
  double bound = 0.0;
  const Values steps = of_q.scale.values(), means = of_k.mean.values();
  for_each(means.shape, [&](int64_t b, int64_t h, int64_t, int64_t) {
    double magnitude = 0.0;
    for (int64_t i = 0; i < c.dim; ++i) magnitude += std::fabs(means.at(b, h, 0, i));
    bound = std::max(bound, c.effective_scale() * largest(steps) / 2 * magnitude);
  });
  expect_near(lse8.values(), lse.values(), bound * (1 + 0x1p-10), "lse");
}

// int8_fp8 quantizes k as octet_quantize does per thread.
TEST(Codes, of_k_per_thread_give_the_same_bits_at_int8_fp8) {
  const Case c{
      .name = "codes", .batch = 2, .heads = 4, .kv_heads = 2, .tokens_q = 100, .tokens_k = 200, .dtype = DType::bf16};
  const Inputs in = draw(c, 4);
  const Buffer q(in.q, DType::bf16), k(in.k, DType::bf16), v(in.v, DType::bf16);
  const Codes of_q(q, OCTET_OPERAND_Q, {}), of_k(k, OCTET_OPERAND_K, {.granularity = OCTET_PER_THREAD, .smooth = true});
  const CodesArgument q8(of_q), k8(of_k);
  const Buffer o(DType::f32, c.o_shape()), o8(DType::f32, c.o_shape());
  const Attention attention{.precision = Precision::int8_fp8, .hadamard = Switch::off, .backend = "cpu"};
  run(attention, Forward{.q = q.view(), .k = k.view(), .v = v.view(), .o = o.view()});
  run(attention, Forward{.q = q8.tensor, .k = k8.tensor, .v = v.view(), .o = o8.view()});
  expect_same_bits(o8.values(), o.values(), "o");
}

// A token of k that is not finite reaches the queries that see it, and no other, in codes as in quantizing inside.
TEST(Codes, of_a_bad_token_of_k_spoil_no_other) {
  const Case c{.name = "bad", .heads = 2, .kv_heads = 2, .tokens_q = 100, .tokens_k = 100, .dtype = DType::bf16};
  const int64_t bad = 71;
  Inputs in = draw(c, 3);
  in.k.at(0, 1, bad, 5) = std::numeric_limits<double>::quiet_NaN();
  const Buffer q(in.q, DType::bf16), k(in.k, DType::bf16), v(in.v, DType::bf16), o(DType::f32, c.o_shape()),
      o8(DType::f32, c.o_shape());
  const Codes of_q(q, OCTET_OPERAND_Q, {}), of_k(k, OCTET_OPERAND_K, kSmooth), of_v(v, OCTET_OPERAND_V, kSmooth);
  const CodesArgument q8(of_q), k8(of_k), v8(of_v);
  const Attention attention{.precision = Precision::int8, .causal = true, .hadamard = Switch::off, .backend = "cpu"};
  run(attention, Forward{.q = q.view(), .k = k.view(), .v = v.view(), .o = o.view()});
  run(attention, Forward{.q = q8.tensor, .k = k8.tensor, .v = v8.tensor, .o = o8.view()});
  expect_same_bits(o8.values(), o.values(), "o");
  const Values got = o8.values();
  for_each(c.o_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t i) {
    ASSERT_EQ(std::isnan(got.at(b, h, t, i)), h == 1 && t >= bad) << h << ' ' << t;
  });
}

SolverOfCodes cpu() { return {"cpu", nullptr}; }

TEST(ZeroPoints, of_q_and_k_leave_logits_exact) {
  for (const Precision precision : {Precision::int8, Precision::int8_f16, Precision::int8_fp8})
    for (const int64_t dim : {8, 64, 256}) expect_exact_logits(cpu, precision, dim);
}
TEST(ZeroPoints, of_v_leave_sums_exact) {
  for (const int64_t dim : {8, 104}) expect_exact_sums_of_v(cpu, dim);
}
TEST(ZeroPoints, beyond_the_codes_make_their_token_nan) { expect_nan_of_wrong_zero_points(cpu); }

// The residual of an o in e4m3 has eight more bits: 2^-12 of a number is half a unit, and at a tie a whole one is lost.
// Below the smallest normal number o has fewer bits, and the residual saturates: it loses no more than rounding does.
void expect_completed(const Outputs& got, const Values& unrounded) {
  for_each(unrounded.shape, [&](int64_t b, int64_t h, int64_t t, int64_t i) {
    const double x = unrounded.at(b, h, t, i), o = got.o.at(b, h, t, i), whole = o + got.o_residual.at(b, h, t, i);
    ASSERT_LE(std::fabs(whole - x),
              std::fabs(x) < 0x1p-6 ? std::fabs(o - x) + 0x1p-12 * std::fabs(x) : 0x1p-11 * std::fabs(x))
        << '[' << b << ", " << h << ", " << t << ", " << i << "]: " << whole << " for " << x;
  });
}

// Against plain arithmetic with the same roundings: o before its cast within .005 relative L2; of its e4m3 numbers at
// least 99.5 % the same, and the others no farther than one step plus what o differed by before.
TEST(Fp8Raw, writes_e4m3) {
  Case c{.name = "fp8_raw",
         .heads = 2,
         .kv_heads = 2,
         .tokens_q = 256,
         .tokens_k = 256,
         .dtype = DType::e4m3,
         .kv_layout = Layout::transposed};
  const Inputs in = draw(c, 3);
  const Recipe recipe{Pass::forward, Precision::fp8_raw};
  const Values wide = compute(c, in, recipe).o, plain_wide = compute(c, in, recipe, 0, "reference").o;
  EXPECT_LE(difference(wide, plain_wide).relative(), .005);
  c.out_dtype = DType::e4m3;
  const Outputs both = compute(c, in, recipe);
  const Values &got = both.o, want = compute(c, in, recipe, 0, "reference").o;
  expect_same_bits(got, rounded(wide, DType::e4m3), "o in e4m3 against o in f32, rounded");
  expect_completed(both, wide);
  int64_t differ = 0;
  for_each(want.shape, [&](int64_t b, int64_t h, int64_t t, int64_t i) {
    const double g = got.at(b, h, t, i), w = want.at(b, h, t, i);
    if (g == w) return;
    ++differ;
    const double step =
        std::max(std::max(std::fabs(g), std::fabs(w)) / 8, 0x1p-9);  // at least one unit in the last place
    EXPECT_LE(std::fabs(g - w), step + std::fabs(wide.at(b, h, t, i) - plain_wide.at(b, h, t, i)))
        << '[' << b << ", " << h << ", " << t << ", " << i << "]: got " << g << ", want " << w << ", seed 3";
  });
  EXPECT_LE(differ, static_cast<int64_t>(want.data.size()) / 200) << "of " << want.data.size() << " elements, seed 3";
}

}  // namespace
}  // namespace octet::test
