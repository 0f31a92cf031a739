// q, k and v that came quantized: codes of int8 and uint8 with zero points bit by bit against integers, and every
// granularity against float64 attention of the numbers that they stand for, beside the CPU.
#include "passes/prequantized.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "gpu/place.h"

namespace octet::test {
namespace {

SolverOfCodes sm80() { return {"sm80", std::make_unique<GpuPlace>()}; }

struct GpuZeroPoints : testing::Test {
  void SetUp() override {
    if (!tests_sm80()) GTEST_SKIP() << "this backend computes no codes of int8";
  }
};

// Two products and a sum in float32 round lse. Sums below 2^20 are exact wherever this tells them from the next
// integer.
constexpr double kLostOfLse = 0x1p-22;

TEST_F(GpuZeroPoints, of_q_and_k_leave_logits_exact) {
  for (const Precision precision : {Precision::int8, Precision::int8_f16, Precision::int8_fp8})
    for (const int64_t dim : {8, 64, 128, 256}) expect_exact_logits(sm80, precision, dim, kLostOfLse);
}

TEST_F(GpuZeroPoints, of_v_leave_sums_exact) {
  for (const int64_t dim : {8, 104, 200}) expect_exact_sums_of_v(sm80, dim);
}

TEST_F(GpuZeroPoints, beyond_the_codes_make_their_token_nan) { expect_nan_of_wrong_zero_points(sm80); }

// A problem, and how its operands are quantized; none: they come as bf16.
struct Prequantized {
  const char* name;
  Precision precision;
  std::optional<Quantizing> q, k, v;
  int64_t dim = 64;
  bool causal = false;
  float softcap = 0;
  MaskTensor mask = MaskTensor::none;
  bool packed = false;
  int64_t tokens_q = 100;
  bool as_numbers = false;  // the CPU gets what the codes stand for
};

constexpr Quantizing kToken{}, kTensor{.granularity = OCTET_PER_TENSOR},
    kBlock{.granularity = OCTET_PER_BLOCK, .block = 48}, kThread{.granularity = OCTET_PER_THREAD},
    kChannel{.granularity = OCTET_PER_CHANNEL}, kSmooth{.smooth = true}, kRotated{.seed = 7},
    kRotatedSmooth{.smooth = true, .seed = 7}, kInteger{.zero_point = OCTET_ZERO_POINT_INTEGER},
    kFloat{.zero_point = OCTET_ZERO_POINT_FLOAT}, kUnsigned{.dtype = DType::u8, .zero_point = OCTET_ZERO_POINT_INTEGER},
    kUnsignedThread{
        .dtype = DType::u8, .granularity = OCTET_PER_THREAD, .zero_point = OCTET_ZERO_POINT_INTEGER, .smooth = true},
    kUnsignedBlock{
        .dtype = DType::u8, .granularity = OCTET_PER_BLOCK, .zero_point = OCTET_ZERO_POINT_INTEGER, .block = 30},
    kUnsignedSmooth{.dtype = DType::u8, .zero_point = OCTET_ZERO_POINT_INTEGER, .smooth = true},
    kInside{.zero_point = OCTET_ZERO_POINT_INTEGER, .layout = Layout::bthd},
    kTransposed{.dtype = DType::u8, .zero_point = OCTET_ZERO_POINT_INTEGER, .layout = Layout::transposed},
    kPadded{.granularity = OCTET_PER_BLOCK, .block = 17, .layout = Layout::padded}, kE4m3{.dtype = DType::e4m3},
    kE4m3Smooth{.dtype = DType::e4m3, .smooth = true},
    kE4m3Block{.dtype = DType::e4m3, .granularity = OCTET_PER_BLOCK, .block = 48},
    kE4m3Thread{.dtype = DType::e4m3, .granularity = OCTET_PER_THREAD, .smooth = true},
    kE4m3Channel{.dtype = DType::e4m3, .granularity = OCTET_PER_CHANNEL},
    kE4m3Tensor{.dtype = DType::e4m3, .granularity = OCTET_PER_TENSOR}, kE4m3Rotated{.dtype = DType::e4m3, .seed = 7},
    kE4m3RotatedSmooth{.dtype = DType::e4m3, .smooth = true, .seed = 7};

class GpuPrequantized : public testing::TestWithParam<Prequantized> {};

TEST_P(GpuPrequantized, errs_as_the_cpu_does) {
  if (!tests_sm80()) GTEST_SKIP() << "this backend computes no codes of int8";
  const Prequantized& x = GetParam();
  Case c{.name = x.name,
         .batch = 2,
         .heads = 4,
         .kv_heads = 2,
         .tokens_q = x.tokens_q,
         .tokens_k = 150,
         .dim = x.dim,
         .dim_v = x.dim,
         .causal = x.causal,
         .alignment = x.causal ? Alignment::bottom_right : Alignment::unspecified,
         .mask = x.mask,
         .dtype = DType::bf16,
         .softcap = x.softcap};
  if (x.packed) c.batch = 1, c.cu_seqlens_q = {0, 37, 37, 100}, c.cu_seqlens_k = {0, 70, 81, 150};
  Inputs in = draw(c, 21);
  // Channels of k and v have means, which smoothing takes.
  for_each(c.k_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t i) { in.k.at(b, h, t, i) += i % 3 - 1.0; });
  for_each(c.v_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t i) { in.v.at(b, h, t, i) += i % 5 - 2.0; });
  const Buffer q(in.q, DType::bf16), k(in.k, DType::bf16), v(in.v, DType::bf16), mask(in.mask, in.mask_dtype);
  const auto codes = [](const Buffer& of, octet_operand operand, const std::optional<Quantizing>& by) {
    return by ? Codes(of, operand, *by) : Codes();
  };
  const Codes q_codes = codes(q, OCTET_OPERAND_Q, x.q), k_codes = codes(k, OCTET_OPERAND_K, x.k),
              v_codes = codes(v, OCTET_OPERAND_V, x.v);
  const auto packing = [](const std::vector<int32_t>& starts) {
    Values values({1, 1, 1, static_cast<int64_t>(starts.size())});
    std::copy(starts.begin(), starts.end(), values.data.begin());
    return Buffer(values, DType::i32);
  };
  const Buffer cu_q = x.packed ? packing(c.cu_seqlens_q) : Buffer(),
               cu_k = x.packed ? packing(c.cu_seqlens_k) : Buffer();
  std::string explained;
  const auto answer = [&](const SolverOfCodes& solver, Precision precision) {
    const Buffer o(DType::f32, c.o_shape()), lse(DType::f32, c.lse_shape());
    std::optional<CodesArgument> of_q, of_k, of_v;
    std::vector<Buffer> decoded;
    const auto argument = [&](std::optional<CodesArgument>& to, const Codes& from, const Buffer& numbers) {
      if (from.codes.present() && x.as_numbers && !solver.place) return solver.at(decoded.emplace_back(from.numbers()));
      return from.codes.present() ? to.emplace(from, solver.place.get()).tensor : solver.at(numbers);
    };
    Forward arguments{.q = argument(of_q, q_codes, q),
                      .k = argument(of_k, k_codes, k),
                      .v = argument(of_v, v_codes, v),
                      .o = solver.at(o),
                      .lse = solver.at(lse)};
    if (in.mask.present()) arguments.extras.mask = solver.at(mask);
    if (x.packed) arguments.extras.cu_seqlens_q = solver.at(cu_q), arguments.extras.cu_seqlens_k = solver.at(cu_k);
    const Attention attention = attention_of(c, precision, solver.backend);
    if (solver.place) explained = explain(attention, arguments);
    solver.solve(attention, arguments);
    return std::pair{o.values(), lse.values()};
  };
  const auto [o, lse] = answer(sm80(), x.precision);
  const auto [cpu_o, cpu_lse] = answer({"cpu"}, x.precision);
  const auto [exact_o, exact_lse] = answer({"reference"}, Precision::f64);
  const Difference got = difference(o, exact_o), want = difference(cpu_o, exact_o);
  // Sums in f16 are rounded four times in a tile of keys, each time by up to half a unit.
  const double unit = explained.find("P v summed in f16") != std::string::npos ? 0x1p-11 : 0.0;
  EXPECT_LE(got.rms, 2 * want.rms + (0x1p-22 + unit) * want.norm) << text(got);
  EXPECT_LE(got.largest, 2 * want.largest + 0x1p-20 * largest(exact_o) + 4 * unit * largest(in.v)) << text(got);
  // Logits of codes are exact, but for float32 arithmetic.
  const Difference got_lse = difference(lse, exact_lse), want_lse = difference(cpu_lse, exact_lse);
  EXPECT_LE(got_lse.largest, 2 * want_lse.largest + 0x1p-19 * largest(exact_lse)) << text(got_lse);
}

// A backward pass of codes is that of the numbers that they stand for.
TEST_F(GpuZeroPoints, have_the_gradients_of_their_numbers) {
  const Case c{.name = "gradients", .batch = 2, .heads = 4, .kv_heads = 2, .tokens_q = 100, .tokens_k = 150};
  const Inputs in = draw(c, 8);
  const Codes q(Buffer(in.q, DType::f32), OCTET_OPERAND_Q, kRotated),
      k(Buffer(in.k, DType::f32), OCTET_OPERAND_K, kUnsignedThread),
      v(Buffer(in.v, DType::f32), OCTET_OPERAND_V, kChannel);
  const Buffer q_numbers = q.numbers(), k_numbers = k.numbers(), v_numbers = v.numbers(), do_(in.do_, DType::f32);
  for (const Precision precision : {Precision::f32, Precision::bf16}) {
    Attention attention{.precision = precision, .deterministic = true, .backend = "sm80"};
    if (precision == Precision::bf16) attention.bias_correction = BiasCorrection::none;
    const Buffer o(DType::f32, c.o_shape()), lse(DType::f32, c.lse_shape());
    const SolverOfCodes forward = sm80();
    forward.solve(attention, Forward{.q = forward.at(q_numbers),
                                     .k = forward.at(k_numbers),
                                     .v = forward.at(v_numbers),
                                     .o = forward.at(o),
                                     .lse = forward.at(lse)});
    std::vector<Values> gradients[2];
    for (const bool as_codes : {false, true}) {
      const SolverOfCodes solver = sm80();
      const CodesArgument of_q(q, solver.place.get()), of_k(k, solver.place.get()), of_v(v, solver.place.get());
      const Buffer dq(DType::f32, c.q_shape()), dk(DType::f32, c.k_shape()), dv(DType::f32, c.v_shape());
      solver.solve(attention, Backward{.q = as_codes ? of_q.tensor : solver.at(q_numbers),
                                       .k = as_codes ? of_k.tensor : solver.at(k_numbers),
                                       .v = as_codes ? of_v.tensor : solver.at(v_numbers),
                                       .o = solver.at(o),
                                       .lse = solver.at(lse),
                                       .do_ = solver.at(do_),
                                       .dq = solver.at(dq),
                                       .dk = solver.at(dk),
                                       .dv = solver.at(dv)});
      gradients[as_codes] = {dq.values(), dk.values(), dv.values()};
    }
    for (int i = 0; i < 3; ++i)
      EXPECT_EQ(difference(gradients[1][i], gradients[0][i]).largest, 0.0) << name(precision) << " gradient " << i;
  }
}

// Without keys o is 0 and lse is -inf, and without queries nothing is written.
TEST_F(GpuZeroPoints, of_no_tokens) {
  for (const auto& [queries, keys] : {std::pair{70, 0}, {0, 70}})
    for (const Precision precision : {Precision::int8, Precision::int8_f16, Precision::fp8, Precision::bf16}) {
      const Case c{.name = "empty", .heads = 2, .kv_heads = 2, .tokens_q = queries, .tokens_k = keys};
      const Codes q(Buffer(normal(c.q_shape(), 1), DType::f32), OCTET_OPERAND_Q, kUnsigned),
          k(Buffer(normal(c.k_shape(), 2), DType::f32), OCTET_OPERAND_K, kUnsignedSmooth),
          v(Buffer(normal(c.v_shape(), 3), DType::f32), OCTET_OPERAND_V, kUnsignedSmooth);
      const SolverOfCodes solver = sm80();
      const CodesArgument of_q(q, solver.place.get()), of_k(k, solver.place.get()), of_v(v, solver.place.get());
      const Buffer o(DType::f32, c.o_shape()), lse(DType::f32, c.lse_shape());
      solver.solve(
          attention_of(c, precision, "sm80"),
          Forward{.q = of_q.tensor, .k = of_k.tensor, .v = of_v.tensor, .o = solver.at(o), .lse = solver.at(lse)});
      EXPECT_EQ(largest(o.values()), 0.0) << name(precision);
      for (const double x : lse.values().data) EXPECT_EQ(x, -INFINITY) << name(precision);
    }
}

// Tokens that nobody sees may have any scale: no bit depends on it.
TEST_F(GpuZeroPoints, of_hidden_keys_change_no_bit) {
  for (const bool masked : {false, true}) {
    Case c{
        .name = "hidden", .batch = 2, .heads = 2, .kv_heads = 2, .tokens_q = 70, .tokens_k = 150, .dtype = DType::bf16};
    if (masked)
      c.mask = MaskTensor::padding;
    else
      c.causal = true, c.alignment = Alignment::top_left;
    const Inputs in = draw(c, 5);
    const Buffer q(in.q, DType::bf16), k(in.k, DType::bf16), v(in.v, DType::bf16), mask(in.mask, in.mask_dtype);
    const Codes q8(q, OCTET_OPERAND_Q, kUnsigned);
    Codes k8(k, OCTET_OPERAND_K, kUnsigned), v8(v, OCTET_OPERAND_V, kUnsigned);
    const auto answer = [&](Precision precision) {
      const SolverOfCodes solver = sm80();
      const Buffer o(DType::f32, c.o_shape()), lse(DType::f32, c.lse_shape());
      const CodesArgument of_q(q8, solver.place.get()), of_k(k8, solver.place.get()), of_v(v8, solver.place.get());
      Forward arguments{.q = of_q.tensor, .k = of_k.tensor, .v = of_v.tensor, .o = solver.at(o), .lse = solver.at(lse)};
      if (masked) arguments.extras.mask = solver.at(mask);
      solver.solve(attention_of(c, precision, "sm80"), arguments);
      return std::pair{o.values(), lse.values()};
    };
    std::vector<std::pair<Values, Values>> answers;
    for (const Precision precision : {Precision::int8, Precision::int8_f16}) answers.push_back(answer(precision));
    for (Codes* x : {&k8, &v8}) {
      Values scale = x->scale.values();
      for_each(scale.shape, [&](int64_t b, int64_t h, int64_t t, int64_t) {
        if (masked ? in.mask.at(b, 0, 0, t) == 0.0 : t >= c.tokens_q) scale.at(b, h, t, 0) = NAN;
      });
      x->scale = Buffer(scale, DType::f32);
    }
    int i = 0;
    for (const Precision precision : {Precision::int8, Precision::int8_f16}) {
      const auto [o, lse] = answer(precision);
      EXPECT_EQ(difference(o, answers[i].first).largest, 0.0) << name(precision) << (masked ? " masked" : " causal");
      EXPECT_EQ(difference(lse, answers[i++].second).largest, 0.0) << name(precision);
    }
  }
}

using enum Precision;
INSTANTIATE_TEST_SUITE_P(
    Operands, GpuPrequantized,
    testing::Values(
        Prequantized{"tokens", int8, kToken, kSmooth, kSmooth},
        Prequantized{"tokens_f16", int8_f16, kToken, kSmooth, kSmooth},
        Prequantized{"tokens_fp8", int8_fp8, kToken, kSmooth, kToken},
        Prequantized{"tensors", int8, kTensor, kTensor, kTensor},
        Prequantized{"blocks_causal", int8, kBlock, kBlock, kBlock, 128, true},
        Prequantized{"blocks_sagebwd_causal", sagebwd, kBlock, kSmooth, kBlock, 128, true},
        Prequantized{"unsigned_sagebwd", sagebwd, kUnsigned, kUnsignedSmooth, kUnsigned},
        Prequantized{"only_v_sagebwd", sagebwd, {}, {}, kUnsignedSmooth},
        Prequantized{"only_q_and_k_sagebwd", sagebwd, kToken, kSmooth, {}},
        Prequantized{"threads", int8, kThread, kThread, kToken},
        Prequantized{"threads_f16_causal", int8_f16, kThread, kThread, kChannel, 128, true},
        Prequantized{"threads_fp8", int8_fp8, kThread, kThread, kChannel, 128},
        Prequantized{"channels", int8, kToken, kToken, kChannel},
        Prequantized{"rotated", int8, kRotated, kRotatedSmooth, kToken},
        Prequantized{.name = "rotated_otherwise",
                     .precision = int8,
                     .q = kRotated,
                     .k = kSmooth,
                     .v = kToken,
                     .as_numbers = true},
        Prequantized{"strides", int8, kInside, kTransposed, kPadded, 128},
        Prequantized{"strides_f16", int8_f16, kPadded, kInside, kTransposed},
        Prequantized{"unsigned_all", int8, kUnsigned, kUnsigned, kUnsigned},
        Prequantized{"unsigned_blocks_causal", int8, kUnsignedBlock, kUnsignedBlock, kUnsignedBlock, 128, true},
        Prequantized{"unsigned_threads_f16", int8_f16, kUnsigned, kUnsignedThread, kUnsigned, 128},
        Prequantized{"unsigned_fp8_causal", int8_fp8, kUnsigned, kUnsignedSmooth, kUnsigned, 64, true},
        Prequantized{"wide_unsigned", int8, kUnsigned, kInteger, kUnsigned, 256},
        Prequantized{"wide_unsigned_f16", int8_f16, kUnsigned, kInteger, kUnsigned, 256},
        Prequantized{"float_zero_points", int8, kFloat, kFloat, kFloat},
        Prequantized{"smooth_q", int8, kSmooth, kSmooth, kSmooth},
        Prequantized{"only_v", int8, {}, {}, kUnsignedSmooth},
        Prequantized{"only_q_and_k", int8, kInteger, kSmooth, {}}, Prequantized{"only_k", int8_f16, {}, kUnsigned, {}},
        Prequantized{"softcap", int8, kToken, kUnsignedSmooth, kSmooth, 64, false, 2.f},
        Prequantized{"masked", int8, kUnsigned, kUnsigned, kUnsignedSmooth, 64, false, 0, MaskTensor::blind},
        Prequantized{"masked_f16", int8_f16, kToken, kSmooth, kSmooth, 64, false, 0, MaskTensor::bias_bf16},
        Prequantized{"masked_keys_f16", int8_f16, kUnsigned, kSmooth, kSmooth, 64, false, 0, MaskTensor::padding},
        Prequantized{"packed", int8, kToken, kSmooth, kSmooth, 64, true, 0, MaskTensor::none, true},
        Prequantized{"packed_unsigned_f16", int8_f16, kUnsigned, kUnsigned, kToken, 64, true, 0, MaskTensor::none,
                     true},
        Prequantized{"few_queries_f16", int8_f16, kUnsigned, kUnsignedSmooth, kToken, 128, false, 0, MaskTensor::none,
                     false, 3},
        Prequantized{"bf16_of_codes", bf16, kUnsigned, kSmooth, kChannel},
        Prequantized{"f32_of_codes", f32, kFloat, kRotatedSmooth, kUnsigned},
        Prequantized{"fp8_of_codes", fp8, kToken, kToken, kChannel},
        Prequantized{"fp8_tokens", fp8, kE4m3, kE4m3Smooth, kE4m3},
        Prequantized{"fp8_blocks_causal", fp8, kE4m3Block, kE4m3Thread, kE4m3Channel, 128, true},
        Prequantized{"fp8_rotated_packed", fp8, kE4m3Rotated, kE4m3RotatedSmooth, kE4m3Tensor, 64, true, 0,
                     MaskTensor::none, true},
        Prequantized{"fp8_only_k", fp8, {}, kE4m3Smooth, {}, 64, false, 2.f},
        Prequantized{"fp8_otherwise_rotated", fp8, kE4m3Rotated, kE4m3Smooth, {}},
        Prequantized{"int8_of_e4m3", int8, kE4m3, kE4m3, kE4m3}),
    [](const testing::TestParamInfo<Prequantized>& info) { return info.param.name; });

}  // namespace
}  // namespace octet::test
