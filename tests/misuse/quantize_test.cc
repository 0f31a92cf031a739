// Everything about quantizers that a caller could get wrong is rejected with the value found and the values allowed,
// and with nothing written.
#include "support/quantizing.h"

namespace octet::quantizing {
namespace {

// A sound call, to be broken in one place.
struct Call {
  Array x_data = Array(DType::bf16, {2, 4, 10, 16}).random(1);
  Quantized results{{.codes = DType::i8, .operand = OCTET_OPERAND_K, .granularity = OCTET_PER_TOKEN, .smooth = true},
                    {2, 4, 10, 16}};
  Tensor x = x_data.tensor(), codes = results.codes_view(), statistics = results.statistics.tensor();
  octet_quantization& quantization = results.quantization;
  octet_tensor& scale = results.scale_view;
  octet_tensor& mean = results.mean_view;
  Array zero_data{DType::f32, {2, 4, 10, 1}};
  Tensor zero = zero_data.tensor();
  Array weight_data{DType::f32, {1, 4, 1, 16}};
  Tensor weight = weight_data.tensor();
  octet_rope rope = OCTET_ROPE_INIT;
  void* stream = nullptr;

  Call() { rope.style = OCTET_ROPE_HALF; }
  void norm() { rope.norm = OCTET_NORM_RMS, rope.norm_weight = &weight; }
  octet_status quantize() { return octet_quantize(&x, &rope, &codes, &statistics, stream); }
};

struct Misuse {
  std::function<void(Call&)> breakage;
  const char* message;  // part of it
  octet_status status = OCTET_INVALID_ARGUMENT;
};

const Misuse kMisuses[] = {
    {[](Call& c) { c.x.size = 3; }, "x: octet_tensor: size 3, allowed: a multiple of 8 from 96"},
    {[](Call& c) { c.x.dtype = OCTET_I32; }, "x: dtype i32, allowed: f64, f32, f16, bf16, e4m3"},
    {[](Call& c) { c.x.data = nullptr; }, "x: null data"},
    {[](Call& c) { c.x.data = static_cast<char*>(c.x.data) + 1; }, "x: data is not aligned to its elements of 2 bytes"},
    {[](Call& c) { c.x.quantization = &c.quantization; }, "x: has a quantization"},
    {[](Call& c) { c.x.device = OCTET_CUDA; }, "codes: on cpu:0, but x is on cuda:0"},
    {[](Call& c) { c.statistics.device = OCTET_CUDA; }, "statistics: on cuda:0, but x is on cpu:0"},
    {[](Call& c) { c.scale.device = OCTET_CUDA; }, "scale: on cuda:0, but its codes are on cpu:0"},
    {[](Call& c) { c.mean.device = OCTET_CUDA; }, "mean: on cuda:0, but its codes are on cpu:0"},
    {[](Call& c) { c.stream = &c; }, "stream: given with CPU tensors"},
    {[](Call& c) { c.codes.dtype = OCTET_I32; }, "codes: dtype i32, allowed: i8, u8, i4, e4m3, e5m2"},
    {[](Call& c) { c.codes.shape[2] = 9; }, "codes: shape [2, 4, 9, 16], expected [2, 4, 10, 16] (shape of x)"},
    {[](Call& c) { c.codes.stride[2] = 0; },
     "codes: strides [640, 160, 0, 1] with shape [2, 4, 10, 16] put several elements of an output in one place"},
    {[](Call& c) { c.codes.quantization = nullptr; }, "codes: no quantization"},
    {[](Call& c) { c.codes.data = c.x.data; }, "codes: its memory overlaps that of x"},
    {[](Call& c) { c.scale.data = c.mean.data; }, "scale: its memory overlaps that of mean"},
    {[](Call& c) { c.statistics.data = c.x.data; }, "statistics: its memory overlaps that of x"},
    {[](Call& c) { c.quantization.size = 8; }, "codes: octet_quantization: size 8"},
    {[](Call& c) { c.quantization.operand = 3; }, "operand: found 3, allowed: 0 (q), 1 (k), 2 (v)"},
    {[](Call& c) { c.quantization.granularity = 5; }, "granularity: found 5, allowed: 0 (tensor), 1 (token)"},
    {[](Call& c) { c.quantization.granularity = OCTET_PER_CHANNEL; },
     "granularity: channel, found for operand k; dim is the index of summation of q k^T, so a scale per channel cannot "
     "be taken out of the sum; "
     "use token, block, thread or tensor for q and k; channel is for v"},
    {[](Call& c) { c.quantization.granularity = OCTET_PER_CHANNEL, c.quantization.operand = OCTET_OPERAND_Q; },
     "granularity: channel, found for operand q"},
    {[](Call& c) { c.quantization.granularity = OCTET_PER_THREAD, c.quantization.operand = OCTET_OPERAND_V; },
     "granularity: thread, found for operand v"},
    {[](Call& c) { c.quantization.granularity = OCTET_PER_BLOCK; }, "block: found 0, allowed: at least 1"},
    {[](Call& c) { c.quantization.block = 64; }, "block: found 64, allowed: 0, as it belongs to granularity block"},
    {[](Call& c) { c.quantization.zero_point_kind = 3; },
     "zero_point_kind: found 3, allowed: 0 (symmetric), 1 (integer), 2 (float)"},
    {[](Call& c) { c.quantization.zero_point_kind = OCTET_ZERO_POINT_FLOAT; }, "zero_point: NULL"},
    {[](Call& c) { c.quantization.zero_point = &c.zero; }, "zero_point: given, but the quantization is symmetric"},
    {[](Call& c) {
       c.quantization.zero_point_kind = OCTET_ZERO_POINT_INTEGER, c.quantization.zero_point = &c.zero,
       c.codes.dtype = OCTET_I4;
     },
     "zero_point_kind: found 1 with i4 codes"},
    {[](Call& c) {
       c.quantization.zero_point_kind = OCTET_ZERO_POINT_INTEGER, c.quantization.zero_point = &c.zero,
       c.zero.shape[2] = 1;
     },
     "zero_point: shape [2, 4, 1, 1], expected [2, 4, 10, 1]"},
    {[](Call& c) { c.quantization.scale = nullptr; }, "scale: NULL"},
    {[](Call& c) { c.scale.dtype = OCTET_BF16; }, "scale: dtype bf16, allowed: f32"},
    {[](Call& c) { c.scale.shape[2] = 1; }, "scale: shape [2, 4, 1, 1], expected [2, 4, 10, 1]"},
    {[](Call& c) { c.mean.shape[3] = 8; }, "mean: shape [2, 4, 1, 8], expected [2, 4, 1, 16]"},
    {[](Call& c) { c.statistics.shape[3] = 3; }, "statistics: shape [2, 4, 1, 3], expected [2, 4, 1, 4]"},
    {[](Call& c) { c.statistics.shape[1] = 2; }, "statistics: shape [2, 2, 1, 4], expected [2, 4, 1, 4]"},
    {[](Call& c) { c.codes.dtype = OCTET_U8; },
     "codes: symmetric u8 holds x >= 0 only, but smoothing gives x both signs; use a zero point, or i8"},
    {[](Call& c) { c.codes.dtype = OCTET_U8, c.quantization.mean = nullptr, c.quantization.hadamard_seed = 1; },
     "but the Hadamard rotation gives x both signs"},
    {[](Call& c) { c.codes.dtype = OCTET_U8, c.quantization.mean = nullptr; },
     "], but symmetric u8 codes hold x >= 0 only; use a zero point, or i8"},
    {[](Call& c) { c.rope.size = 1; }, "octet_rope: size 1"},
    {[](Call& c) { c.rope.style = 3; }, "rope style: found 3, allowed: 0 (none), 1 (half), 2 (interleaved)"},
    {[](Call& c) { c.rope.style = OCTET_ROPE_NONE, c.rope.offset = 4; },
     "rope: dim 0, offset 4, base 0 given with style none"},
    {[](Call& c) { c.rope.dim = 5; }, "rope dim: found 5, allowed: even, from 2 to the head dim 16"},
    {[](Call& c) { c.rope.dim = 18; }, "rope dim: found 18"},
    {[](Call& c) { c.rope.dim = -2; }, "rope dim: found -2"},
    {[](Call& c) { c.rope.offset = INT64_MAX; }, "rope offset: found 9223372036854775807 with 10 tokens"},
    {[](Call& c) { c.rope.base = -1; }, "rope base: found -1, allowed: finite and at least 1e-300, or 0 for 10000"},
    {[](Call& c) { c.rope.norm = 2; }, "rope norm: found 2, allowed: 0 (none), 1 (rms)"},
    {[](Call& c) { c.rope.norm_eps = 1e-3f; }, "norm_eps: 0.001 given with norm none; choose rms, or leave it 0"},
    {[](Call& c) { c.rope.norm_weight = &c.weight; }, "norm_weight: given with norm none; choose rms, or pass NULL"},
    {[](Call& c) { c.rope.norm = OCTET_NORM_RMS, c.rope.norm_eps = -1; },
     "norm_eps: found -1, allowed: finite and 0 or more"},
    {[](Call& c) { c.rope.norm = OCTET_NORM_RMS, c.rope.norm_eps = NAN; }, "norm_eps: found nan"},
    {[](Call& c) { c.norm(), c.weight.dtype = OCTET_F64; }, "norm_weight: dtype f64, allowed: f32, f16, bf16"},
    {[](Call& c) { c.norm(), c.weight.shape[3] = 8; },
     "norm_weight: shape [1, 4, 1, 8], expected [1, 4, 1, 16] (1, 1 or heads, 1, dim of x)"},
    {[](Call& c) { c.norm(), c.weight.shape[1] = 2; }, "norm_weight: shape [1, 2, 1, 16], expected [1, 4, 1, 16]"},
    {[](Call& c) { c.norm(), c.weight.shape[1] = 1, c.weight.shape[2] = 4; },
     "norm_weight: shape [1, 1, 4, 16], expected [1, 1, 1, 16]"},
    {[](Call& c) { c.norm(), c.weight.device = OCTET_CUDA; }, "norm_weight: on cuda:0, but x is on cpu:0"},
    {[](Call& c) { c.norm(), c.weight.data = nullptr; }, "norm_weight: null data"},
    {[](Call& c) { c.norm(), c.weight.data = c.scale.data; }, "scale: its memory overlaps that of norm_weight"},
    {[](Call& c) { c.rope.base = NAN; }, "rope base: found nan"},
};

TEST(QuantizeMisuse, IsRejectedByNameWithNothingWritten) {
  EXPECT_EQ(Call().quantize(), OCTET_OK) << octet_message();
  for (const Misuse& misuse : kMisuses) {
    Call call;
    const auto codes = call.results.codes.bytes(), scale = call.results.scale.bytes(), mean = call.results.mean.bytes(),
               statistics = call.results.statistics.bytes();
    misuse.breakage(call);
    EXPECT_EQ(call.quantize(), misuse.status) << misuse.message;
    EXPECT_NE(std::string(octet_message()).find(misuse.message), std::string::npos)
        << "expected: " << misuse.message << "\nfound: " << octet_message();
    EXPECT_TRUE(codes == call.results.codes.bytes() && scale == call.results.scale.bytes() &&
                mean == call.results.mean.bytes() && statistics == call.results.statistics.bytes())
        << misuse.message;
  }
}

TEST(QuantizeMisuse, MissingTensors) {
  Call c;
  EXPECT_EQ(octet_quantize(nullptr, nullptr, &c.codes, nullptr, nullptr), OCTET_INVALID_ARGUMENT);
  EXPECT_STREQ(octet_message(), "x: NULL");
  EXPECT_EQ(octet_quantize(&c.x, nullptr, nullptr, nullptr, nullptr), OCTET_INVALID_ARGUMENT);
  EXPECT_STREQ(octet_message(), "codes: NULL");
  EXPECT_EQ(octet_dequantize(nullptr, &c.x, nullptr), OCTET_INVALID_ARGUMENT);
  EXPECT_EQ(octet_dequantize(&c.codes, nullptr, nullptr), OCTET_INVALID_ARGUMENT);
  EXPECT_EQ(octet_apply_rope(nullptr, &c.x, 0, &c.x, nullptr), OCTET_INVALID_ARGUMENT);
  EXPECT_STREQ(octet_message(), "rope: NULL");
  EXPECT_EQ(octet_logit_error(nullptr, nullptr, 1, nullptr, nullptr), OCTET_INVALID_ARGUMENT);
  EXPECT_EQ(octet_scale_groups(0, 0, 0, 1, nullptr), OCTET_INVALID_ARGUMENT);
}

void expect_rejected(const char* message, octet_status status) {
  EXPECT_EQ(status, OCTET_INVALID_ARGUMENT) << message;
  EXPECT_NE(std::string(octet_message()).find(message), std::string::npos)
      << "expected: " << message << "\nfound: " << octet_message();
}

TEST(QuantizeMisuse, Dequantize) {
  Call c;
  Array out(DType::f32, {2, 4, 10, 16});
  Tensor y = out.tensor();
  ASSERT_EQ(octet_dequantize(&c.codes, &y, nullptr), OCTET_OK) << octet_message();
  expect_rejected("codes: dtype bf16, allowed: i8, u8, i4, e4m3, e5m2", octet_dequantize(&c.x, &y, nullptr));
  Tensor bad = y;
  bad.dtype = OCTET_I8;
  expect_rejected("x: dtype i8, allowed: f64, f32, f16, bf16", octet_dequantize(&c.codes, &bad, nullptr));
  bad = y;
  bad.shape[1] = 3;
  expect_rejected("x: shape [2, 3, 10, 16], expected [2, 4, 10, 16] (shape of codes)",
                  octet_dequantize(&c.codes, &bad, nullptr));
  c.scale.data = out.data();
  expect_rejected("x: its memory overlaps that of scale", octet_dequantize(&c.codes, &y, nullptr));
}

TEST(QuantizeMisuse, ApplyRope) {
  Call c;
  Tensor half_overlap = c.x;
  half_overlap.shape[2] = 9, half_overlap.data = static_cast<char*>(half_overlap.data) + 2;
  Tensor x = c.x;
  x.shape[2] = 9;
  expect_rejected("y: its memory overlaps that of x", octet_apply_rope(&c.rope, &x, 0, &half_overlap, nullptr));
  expect_rejected("inverse: found 2, allowed: 0, 1", octet_apply_rope(&c.rope, &c.x, 2, &c.x, nullptr));
  c.rope.style = OCTET_ROPE_NONE;
  expect_rejected("rope style: found 0 (none), allowed: 1 (half), 2 (interleaved), or with norm 1 (rms) also 0",
                  octet_apply_rope(&c.rope, &c.x, 0, &c.x, nullptr));
  c.norm();
  EXPECT_EQ(octet_apply_rope(&c.rope, &c.x, 0, &c.x, nullptr), OCTET_OK) << octet_message();
  expect_rejected("inverse: found 1 with norm rms, which is not undone; allowed with it: 0",
                  octet_apply_rope(&c.rope, &c.x, 1, &c.x, nullptr));
  c.weight.data = c.x.data;
  expect_rejected("y: its memory overlaps that of norm_weight", octet_apply_rope(&c.rope, &c.x, 0, &c.x, nullptr));
  c.rope = OCTET_ROPE_INIT;
  c.rope.style = OCTET_ROPE_HALF;
  Array odd(DType::f32, {1, 1, 4, 7});
  const Tensor in = odd.tensor();
  Tensor out = odd.tensor();
  expect_rejected("rope dim: found 0 (all 7), allowed: even", octet_apply_rope(&c.rope, &in, 0, &out, nullptr));
}

TEST(QuantizeMisuse, GroupsAndLogitErrors) {
  int64_t groups = 0;
  expect_rejected("tokens: found -1", octet_scale_groups(OCTET_OPERAND_K, OCTET_PER_TOKEN, 0, -1, &groups));
  expect_rejected("block: found -3", octet_scale_groups(OCTET_OPERAND_K, OCTET_PER_BLOCK, -3, 5, &groups));
  Array q_data = Array(DType::f32, {1, 6, 1, 4}).random(1), k_data = Array(DType::f32, {1, 2, 1, 4}).random(2);
  Array out(DType::f32, {1, 6, 1, 1});
  Tensor q = q_data.tensor(), k = k_data.tensor(), error = out.tensor();
  ASSERT_EQ(octet_logit_error(&q, &k, 1, &error, nullptr), OCTET_OK) << octet_message();
  EXPECT_TRUE(out.intact());
  for (const float scale : {0.f, -1.f, NAN, INFINITY})
    expect_rejected("allowed: positive and finite", octet_logit_error(&q, &k, scale, &error, nullptr));
  expect_rejected("k_statistics: 6 heads, but q_statistics has 2", octet_logit_error(&k, &q, 1, &error, nullptr));
  k.shape[1] = 1;
  expect_rejected("error: its memory overlaps that of k_statistics",
                  (error.data = k.data, octet_logit_error(&q, &k, 1, &error, nullptr)));
  error.shape[1] = 2;
  expect_rejected("error: shape [1, 2, 1, 1], expected [1, 6, 1, 1]", octet_logit_error(&q, &k, 1, &error, nullptr));
}

}  // namespace
}  // namespace octet::quantizing
