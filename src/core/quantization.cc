// Validates the arguments of the quantizers: formats, granularities, zero points, RoPE, shapes, memory. What passes
// here is trusted by src/cpu and src/cuda.
#include "core/quantization.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "core/arguments.h"
#include "core/error.h"
#include "core/names.h"
#include "core/structs.h"

namespace octet {
namespace {

constexpr double kMinRopeBase = 1e-300;             // angles of smaller ones would overflow
constexpr int64_t kMaxPosition = int64_t{1} << 40;  // keeps position * theta accurate

}  // namespace

namespace {

void validate_norm(const octet_rope& r, const octet_tensor& x_in, const View& x, Rope& rope) {
  rope.norm = checked(r.norm, OCTET_NORM_NONE, OCTET_NORM_RMS, "rope norm");
  if (rope.norm == OCTET_NORM_NONE) {
    if (r.norm_eps != 0.f) invalid("norm_eps: ", r.norm_eps, " given with norm none; choose rms, or leave it 0");
    if (r.norm_weight) invalid("norm_weight: given with norm none; choose rms, or pass NULL");
    return;
  }
  rope.norm_eps = r.norm_eps;
  if (!(r.norm_eps >= 0.f) || !std::isfinite(r.norm_eps))
    invalid("norm_eps: found ", r.norm_eps, ", allowed: finite and 0 or more");
  if (!r.norm_weight) return;
  View& weight = rope.norm_weight = plain(r.norm_weight, "norm_weight", false);
  expect_dtype(weight, "norm_weight", {OCTET_F32, OCTET_F16, OCTET_BF16});
  const bool of_heads = weight.shape[1] != 1;
  expect_shape(weight, "norm_weight", {1, of_heads ? x.shape[1] : 1, 1, x.shape[3]}, "1, 1 or heads, 1, dim of x");
  expect_beside(*r.norm_weight, "norm_weight", x_in, "x is");
  weight.shape[0] = x.shape[0], weight.shape[1] = x.shape[1];
  weight.stride[0] = weight.stride[2] = 0;
  if (!of_heads) weight.stride[1] = 0;
}

}  // namespace

Rope validate_rope(const octet_rope& given, const octet_tensor& x_in, const View& x) {
  const octet_rope r = whole(given, "octet_rope");
  Rope rope;
  validate_norm(r, x_in, x, rope);
  rope.style = checked(r.style, OCTET_ROPE_NONE, OCTET_ROPE_INTERLEAVED, "rope style");
  if (rope.style == OCTET_ROPE_NONE) {
    if (r.dim || r.offset || r.base != 0.0)
      invalid("rope: dim ", r.dim, ", offset ", r.offset, ", base ", r.base,
              " given with style none; choose half or interleaved, or leave all 0");
    return rope;
  }
  const int64_t dim = x.shape[3], tokens = x.shape[2];
  rope.dim = r.dim ? r.dim : dim;
  if (rope.dim < 0 || rope.dim > dim || rope.dim % 2)
    invalid("rope dim: found ", r.dim, r.dim ? "" : text(" (all ", dim, ")"),
            ", allowed: even, from 2 to the head dim ", dim, ", or 0 for all of an even head dim");
  rope.offset = r.offset;
  if (r.offset < -kMaxPosition || r.offset > kMaxPosition - std::min(tokens, kMaxPosition))
    invalid("rope offset: found ", r.offset, " with ", tokens, " tokens, allowed: positions from -2^40 to 2^40");
  rope.base = r.base == 0.0 ? 10000.0 : r.base;
  if (!(rope.base >= kMinRopeBase) || !std::isfinite(rope.base))
    invalid("rope base: found ", r.base, ", allowed: finite and at least ", kMinRopeBase, ", or 0 for 10000");
  return rope;
}

namespace {

void validate_granularity(octet_operand operand, octet_granularity granularity, int64_t block) {
  if (granularity == OCTET_PER_CHANNEL && operand != OCTET_OPERAND_V)
    invalid("granularity: channel, found for operand ", name(operand),
            "; dim is the index of summation of q k^T, so a scale per channel cannot be taken out of the sum; "
            "use token, block, thread or tensor for q and k; channel is for v");
  if (granularity == OCTET_PER_THREAD && operand == OCTET_OPERAND_V)
    invalid(
        "granularity: thread, found for operand v; thread groups are the rows of q and k in the fragments of q k^T; "
        "use token, block, channel or tensor for v");
  if (granularity == OCTET_PER_BLOCK ? block < 1 : block != 0)
    invalid("block: found ", block, ", allowed: ",
            granularity == OCTET_PER_BLOCK ? "at least 1 token per group" : "0, as it belongs to granularity block");
}

octet_granularity granularity_of(uint32_t value) {
  return checked(value, OCTET_PER_TENSOR, OCTET_PER_THREAD, "granularity");
}

octet_operand operand_of(uint32_t value) { return checked(value, OCTET_OPERAND_Q, OCTET_OPERAND_V, "operand"); }

// Number of scale rows; the arguments have been validated.
int64_t groups_of(octet_operand operand, octet_granularity granularity, int64_t block, int64_t tokens) {
  switch (granularity) {
    case OCTET_PER_TOKEN:
      return tokens;
    case OCTET_PER_BLOCK:
      return tokens / block + (tokens % block != 0);
    case OCTET_PER_THREAD: {
      const int64_t tile = operand == OCTET_OPERAND_Q ? kThreadTileQ : kThreadTileK;
      return (tokens / tile + (tokens % tile != 0)) * (operand == OCTET_OPERAND_Q ? kThreadGroupsQ : kThreadGroupsK);
    }
    default:
      return 1;
  }
}

// u8 codes are never negative: without a zero point neither may x be.
void validate_u8(const View& codes, const Quantization& how) {
  if (codes.dtype != OCTET_U8 || how.zero_point_kind != OCTET_SYMMETRIC) return;
  if (how.mean.present() || how.hadamard_seed)
    invalid("codes: symmetric u8 holds x >= 0 only, but ", how.mean.present() ? "smoothing" : "the Hadamard rotation",
            " gives x both signs; use a zero point, or i8");
}

View validate_statistics(const octet_tensor* t, const char* label, bool output) {
  const View s = plain(t, label, output);
  expect_dtype(s, label, {OCTET_F32});
  expect_shape(s, label, {s.shape[0], s.shape[1], 1, OCTET_STATISTICS}, "[batch, head, 1, OCTET_STATISTICS]");
  return s;
}

}  // namespace

Quantization validate_quantization(const octet_tensor& codes, const char* label, bool output) {
  const octet_quantization* q = codes.quantization;
  if (!q) invalid(label, ": no quantization; it says how the codes stand for numbers");
  expect_size(*q, label, ": octet_quantization");
  const auto dtype = static_cast<octet_dtype>(codes.dtype);
  const int64_t batch = codes.shape[0], heads = codes.shape[1], tokens = codes.shape[2], dim = codes.shape[3];
  Quantization how{};
  how.operand = operand_of(q->operand);
  how.granularity = granularity_of(q->granularity);
  how.block = q->block;
  how.hadamard_seed = q->hadamard_seed;
  validate_granularity(how.operand, how.granularity, how.block);

  how.zero_point_kind = checked(q->zero_point_kind, OCTET_SYMMETRIC, OCTET_ZERO_POINT_FLOAT, "zero_point_kind");
  const bool symmetric = how.zero_point_kind == OCTET_SYMMETRIC;
  if (!symmetric && dtype != OCTET_I8 && dtype != OCTET_U8)
    invalid("zero_point_kind: found ", q->zero_point_kind, " with ", name(dtype),
            " codes, allowed with them: 0 (symmetric); zero points are for i8 and u8");
  if (symmetric && q->zero_point) invalid("zero_point: given, but the quantization is symmetric; pass NULL");

  const char* shape = how.per_channel() ? "[batch, head, 1, dim] per channel" : "[batch, head, octet_scale_groups, 1]";
  const int64_t groups = groups_of(how.operand, how.granularity, how.block, tokens);
  const int64_t want[4] = {batch, heads, groups, how.per_channel() ? dim : 1};
  how.scale = part_of(codes, q->scale, "scale", output);
  expect_dtype(how.scale, "scale", {OCTET_F32});
  expect_shape(how.scale, "scale", want, shape);
  if (!symmetric) {
    how.zero_point = part_of(codes, q->zero_point, "zero_point", output);
    expect_dtype(how.zero_point, "zero_point", {OCTET_F32});
    expect_shape(how.zero_point, "zero_point", want, "shape of scale");
  }
  if (q->mean) {
    how.mean = part_of(codes, q->mean, "mean", output);
    expect_dtype(how.mean, "mean", {OCTET_F32});
    expect_shape(how.mean, "mean", {batch, heads, 1, dim}, "[batch, head, 1, dim]");
  }
  return how;
}

void quantize(const octet_tensor* x_in, const octet_rope* rope_in, octet_tensor* codes_out,
              octet_tensor* statistics_out, void* stream) {
  const View x = plain(x_in, "x", false);
  expect_dtype(x, "x", {OCTET_F64, OCTET_F32, OCTET_F16, OCTET_BF16, OCTET_E4M3});
  const Rope rope = rope_in ? validate_rope(*rope_in, *x_in, x) : Rope{};
  const View codes = view_of(codes_out, "codes", true);
  expect_beside(*codes_out, "codes", *x_in, "x is");
  expect_dtype(codes, "codes", {OCTET_I8, OCTET_U8, OCTET_I4, OCTET_E4M3, OCTET_E5M2});
  expect_shape(codes, "codes", x.shape, "shape of x");
  const Quantization how = validate_quantization(*codes_out, "codes", true);
  validate_u8(codes, how);
  View statistics;
  if (statistics_out) {
    statistics = validate_statistics(statistics_out, "statistics", true);
    expect_shape(statistics, "statistics", {x.shape[0], x.shape[1], 1, OCTET_STATISTICS}, "batch and heads of x");
    expect_beside(*statistics_out, "statistics", *x_in, "x is");
  }
  [[maybe_unused]] const auto place = place_of(*x_in, "x", stream);
  expect_memory_of_their_own({{&codes, "codes"},
                              {&how.scale, "scale"},
                              {&how.zero_point, "zero_point"},
                              {&how.mean, "mean"},
                              {&statistics, "statistics"}},
                             {{&x, "x"}, {&rope.norm_weight, "norm_weight"}});
#ifdef OCTET_CUDA_QUANTIZERS
  if (place) return cuda::quantize(x, rope, codes, how, statistics, *place);
#endif
  cpu::quantize(x, rope, codes, how, statistics);
}

void dequantize(const octet_tensor* codes_in, octet_tensor* x_out, void* stream) {
  const View codes = view_of(codes_in, "codes", false);
  expect_dtype(codes, "codes", {OCTET_I8, OCTET_U8, OCTET_I4, OCTET_E4M3, OCTET_E5M2});
  const Quantization how = validate_quantization(*codes_in, "codes", false);
  const View x = plain(x_out, "x", true);
  expect_dtype(x, "x", {OCTET_F64, OCTET_F32, OCTET_F16, OCTET_BF16});
  expect_shape(x, "x", codes.shape, "shape of codes");
  expect_beside(*x_out, "x", *codes_in, "its codes are");
  [[maybe_unused]] const auto place = place_of(*codes_in, "codes", stream);
  expect_memory_of_their_own(
      {{&x, "x"}}, {{&codes, "codes"}, {&how.scale, "scale"}, {&how.zero_point, "zero_point"}, {&how.mean, "mean"}});
#ifdef OCTET_CUDA_QUANTIZERS
  if (place) return cuda::dequantize(codes, how, x, *place);
#endif
  cpu::dequantize(codes, how, x);
}

void apply_rope(const octet_rope* rope_in, const octet_tensor* x_in, uint32_t inverse, octet_tensor* y_out,
                void* stream) {
  const View x = plain(x_in, "x", false);
  expect_dtype(x, "x", {OCTET_F64, OCTET_F32, OCTET_F16, OCTET_BF16, OCTET_E4M3});
  if (!rope_in) invalid("rope: NULL");
  const Rope rope = validate_rope(*rope_in, *x_in, x);
  if (!rope.present())
    invalid("rope style: found 0 (none), allowed: 1 (half), 2 (interleaved), or with norm 1 (rms) also 0");
  if (inverse > 1) invalid("inverse: found ", inverse, ", allowed: 0, 1");
  if (inverse && rope.norm != OCTET_NORM_NONE)
    invalid("inverse: found 1 with norm ", name(rope.norm), ", which is not undone; allowed with it: 0");
  const View y = plain(y_out, "y", true);
  expect_dtype(y, "y", {OCTET_F64, OCTET_F32, OCTET_F16, OCTET_BF16});
  expect_shape(y, "y", x.shape, "shape of x");
  expect_beside(*y_out, "y", *x_in, "x is");
  [[maybe_unused]] const auto place = place_of(*x_in, "x", stream);
  const bool in_place = x.data == y.data && x.dtype == y.dtype && std::equal(x.stride, x.stride + 4, y.stride);
  if (!in_place) expect_no_overlap(y, "y", x, "x");
  expect_memory_of_their_own({{&y, "y"}}, {{&rope.norm_weight, "norm_weight"}});
#ifdef OCTET_CUDA_QUANTIZERS
  if (place) return cuda::apply_rope(rope, inverse != 0, x, y, *place);
#endif
  cpu::apply_rope(rope, inverse != 0, x, y);
}

int64_t scale_groups(uint32_t operand_in, uint32_t granularity_in, int64_t block, int64_t tokens) {
  const octet_operand operand = operand_of(operand_in);
  const octet_granularity granularity = granularity_of(granularity_in);
  validate_granularity(operand, granularity, block);
  if (tokens < 0) invalid("tokens: found ", tokens, ", allowed: 0 or more");
  return groups_of(operand, granularity, block, tokens);
}

void logit_error(const octet_tensor* q_in, const octet_tensor* k_in, float scale, octet_tensor* error_out,
                 void* stream) {
  const View q = validate_statistics(q_in, "q_statistics", false), k = validate_statistics(k_in, "k_statistics", false);
  const int64_t heads = q.shape[1], kv_heads = k.shape[1];
  if (q.shape[0] != k.shape[0])
    invalid("k_statistics: batch ", k.shape[0], ", expected ", q.shape[0], " as q_statistics");
  if (heads && (!kv_heads || heads % kv_heads))
    invalid("k_statistics: ", kv_heads, " heads, but q_statistics has ", heads, "; allowed: a divisor of it");
  if (!(scale > 0.f) || !std::isfinite(scale)) invalid("scale: found ", scale, ", allowed: positive and finite");
  const View error = plain(error_out, "error", true);
  expect_dtype(error, "error", {OCTET_F32});
  expect_shape(error, "error", {q.shape[0], heads, 1, 1}, "batch and heads of q");
  for (const auto& [tensor, label] : {std::pair{q_in, "q_statistics"}, {k_in, "k_statistics"}, {error_out, "error"}})
    if (tensor->device != OCTET_CPU) unsupported(label, ": on ", device_of(*tensor), ", allowed: cpu");
  if (stream) invalid("stream: given with CPU tensors; pass NULL");
  expect_memory_of_their_own({{&error, "error"}}, {{&q, "q_statistics"}, {&k, "k_statistics"}});
  cpu::logit_error(q, k, scale, error);
}

}  // namespace octet
