// The precisions and their recipes. docs/numerics.md states each recipe in formulas, with its sources and what it costs
// in accuracy.
#include "core/recipe.h"

#include <iterator>

#include "core/error.h"
#include "core/names.h"

namespace octet {
namespace {

// These are what calls may ask of a precision, beside its forward pass.
struct Row {
  octet_precision precision;
  const char* name;
  bool backward, jvp;
  bool bias_correction;  // takes bias corrections and beta
  bool int8_options;     // takes hadamard and smooth_q
  bool e4m3_outputs;     // writes e4m3
};
constexpr bool yes = true, no = false;
constexpr Row kRows[] = {
    {OCTET_PRECISION_NONE, "none", no, no, no, no, no},
    //                           backward  jvp  bias correction  int8  e4m3
    {OCTET_PRECISION_F64, "f64", yes, yes, no, no, yes},
    {OCTET_PRECISION_F32, "f32", yes, yes, no, no, no},
    {OCTET_PRECISION_F16, "f16", yes, yes, yes, no, no},
    {OCTET_PRECISION_BF16, "bf16", yes, yes, yes, no, no},
    {OCTET_PRECISION_INT8, "int8", yes, no, no, yes, no},
    {OCTET_PRECISION_INT8_F16, "int8_f16", no, no, no, yes, no},
    {OCTET_PRECISION_INT8_FP8, "int8_fp8", no, no, no, yes, no},
    {OCTET_PRECISION_FP8, "fp8", yes, no, no, no, no},
    {OCTET_PRECISION_FP8_RAW, "fp8_raw", no, no, no, no, yes},
    {OCTET_PRECISION_SAGEBWD, "sagebwd", yes, no, no, no, no},
};
static_assert([] {
  for (std::size_t i = 0; i < std::size(kRows); ++i)
    if (kRows[i].precision != i) return false;
  return std::size(kRows) == kLastPrecision + 1;
}());

template <class Has>
PrecisionSet precisions_where(Has&& has) {
  PrecisionSet set;
  for (const Row& row : kRows)
    if (row.precision != OCTET_PRECISION_NONE && has(row)) set = set | PrecisionSet{row.precision};
  return set;
}

PrecisionSet precisions_with(octet_pass pass) {
  return precisions_where(
      [&](const Row& row) { return pass == OCTET_FORWARD || (pass == OCTET_BACKWARD ? row.backward : row.jvp); });
}

constexpr int64_t kTile = 64;  // queries or keys that a tile of p or ds shares scales over

constexpr Quantizer per_token(octet_dtype format) { return {format, Group::token}; }
constexpr Quantizer per_block(octet_dtype format, int64_t tokens) { return {format, Group::block, tokens}; }
constexpr Quantizer keys_of_a_thread(octet_dtype format) { return {format, Group::thread_k}; }
constexpr Quantizer per_channel(octet_dtype format) { return {format, Group::channel}; }
constexpr Quantizer per_tensor(octet_dtype format) { return {format, Group::tensor}; }
constexpr Quantizer cast(octet_dtype format) { return {format}; }
constexpr Quantizer scaled_f16() { return {OCTET_F16, Group::power_of_two}; }

constexpr PRecipe fixed(octet_dtype format, double factor = 1.0) { return {format, PRecipe::Scale::fixed, factor}; }
constexpr PRecipe largest(octet_dtype format) { return {format, PRecipe::Scale::largest}; }

constexpr double kPFactor = 0x1p15;  // p = 1 becomes half the largest f16, so that p down to 2^-29 keeps its 11 bits
constexpr TileRecipe tile(octet_dtype format, int64_t rows, int64_t cols) { return {format, rows, cols}; }
constexpr TileRecipe f16_in_any_range() { return {.format = OCTET_F16, .power_of_two = true}; }

LogitRecipe int8_logits(bool hadamard, bool smooth_q) {
  return {.q = per_token(OCTET_I8),
          .k = per_token(OCTET_I8),
          .smooth_k = kAllTokens,
          .smooth_q = smooth_q ? kQueryBlock : 0,
          .hadamard = hadamard};
}

// Operands and results in one format, nothing else rounded.
Recipe format_only(octet_dtype format) {
  Recipe r;
  r.logits = {.q = cast(format), .k = cast(format)};
  r.v = cast(format);
  r.tangent = format;
  r.backward = {.logits = r.logits, .exact_o = true, .v = cast(format), .do_dp = cast(format), .do_dv = cast(format)};
  return r;
}

Recipe corrected(octet_dtype format, octet_bias_correction bias_correction, double beta) {
  Recipe r = flash_attention(format);
  r.backward.exact_o = bias_correction == OCTET_BIAS_CORRECTION_EXACT_DELTA;
  if (bias_correction == OCTET_BIAS_CORRECTION_GPROJ) r.backward.gproj = format;
  if (bias_correction == OCTET_BIAS_CORRECTION_BETA) {
    r.beta = beta;
    // Half of the format's range, so that the other half is left to the other keys.
    r.beta_limit = format == OCTET_F16 ? 4.0 : 40.0;
    // When both are rounded alike, a shift cancels from p / l, and with it the bias correction.
    r.sum_rounded_p = false;
  }
  return r;
}

Recipe sixteen_bits(const Problem& p) {
  const octet_dtype format = p.precision == OCTET_PRECISION_F16 ? OCTET_F16 : OCTET_BF16;
  if (p.bias_correction != OCTET_BIAS_CORRECTION_F16) return corrected(format, p.bias_correction, p.beta);
  return p.pass != OCTET_FORWARD || format == OCTET_F16 || keeps_exact_o(p) ? f16_compute(format)
                                                                            : flash_attention(format);
}

Recipe rounded(const octet_rounding& points) {
  const auto dtype = [](uint32_t value) { return static_cast<octet_dtype>(value); };
  Recipe r;
  r.logits = {.q = cast(dtype(points.qk)), .k = cast(dtype(points.qk))};
  r.v = cast(dtype(points.v));
  r.s = dtype(points.s), r.m = dtype(points.m), r.arg = dtype(points.arg);
  r.alpha = dtype(points.alpha), r.acc = dtype(points.acc), r.o = dtype(points.o);
  r.scale_first = points.s_scaled;
  r.p = fixed(dtype(points.p));
  r.sum_rounded_p = points.l_from_p;
  r.tile = points.tile ? points.tile : Problem::kUnbounded;
  r.beta = points.beta, r.tie_epsilon = points.tie_epsilon;
  r.backward = {.logits = r.logits,
                .delta = static_cast<octet_delta>(points.delta),
                .exact_o = true,
                .o_saved = dtype(points.o_saved),
                .v = r.v,
                .ds_q = {dtype(points.ds)},
                .ds_k = {dtype(points.ds)},
                .p = {dtype(points.p_backward)}};
  return r;
}

Recipe int8_of(const Problem& p) {
  const bool trains = p.pass == OCTET_FORWARD && p.o_residual.present();
  Recipe r = (trains ? octet_int8_training : octet_int8)(p.hadamard, p.smooth_q);
  // After dropout a row of P does not sum to 1: the mean of v, once subtracted, could not be added to o again.
  if (p.dropout) r.smooth_v = false;
  return r;
}

}  // namespace

Recipe flash_attention(octet_dtype format) {
  Recipe r = format_only(format);
  if (format == OCTET_F16) r.tile = kStep;
  r.p = fixed(format);
  r.sum_rounded_p = true;
  r.backward.exact_o = false;
  r.backward.ds_q = r.backward.ds_k = r.backward.p = {format};
  return r;
}

Recipe f16_compute(octet_dtype format) {
  Recipe r = format_only(format);
  r.tile = kStep;
  r.p = fixed(OCTET_F16, kPFactor);
  r.sum_rounded_p = true;
  if (format == OCTET_F16)
    r.backward.do_dp = r.backward.do_dv = scaled_f16();  // gradients may be too small for f16 as they are
  r.backward.smooth_dq = scaled_f16();
  r.backward.ds_q = r.backward.ds_k = f16_in_any_range();
  r.backward.p = {.format = OCTET_F16, .factor = kPFactor};
  return r;
}

Recipe octet_int8(bool hadamard, bool smooth_q) {
  Recipe r;
  r.logits = int8_logits(hadamard, smooth_q);
  r.p = largest(OCTET_U8);
  r.v = per_token(OCTET_I8);
  r.smooth_v = r.fold_v = true;
  r.backward = {.logits = r.logits,
                .smooth_dq = scaled_f16(),
                .q_dk = scaled_f16(),
                .recompute = true,
                .delta = OCTET_DELTA_FROM_P,
                .v = per_token(OCTET_I8),
                .do_dp = per_token(OCTET_I8),
                .smooth_v = true,
                .ds_q = f16_in_any_range(),
                .ds_k = f16_in_any_range(),
                .p = {.format = OCTET_F16, .factor = kPFactor},
                .do_dv = scaled_f16()};
  r.backward.logits.smooth_k = kTile;
  r.backward.logits.smooth_q = 0;
  return r;
}

Recipe octet_int8_f16(bool hadamard, bool smooth_q) {
  Recipe r;
  r.tile = kStep;
  r.logits = int8_logits(hadamard, smooth_q);
  r.p = fixed(OCTET_F16);
  r.sum_rounded_p = true;
  r.v = scaled_f16();
  return r;
}

// P in f16 leaves the o and lse of the very s and dp that the backward pass multiplies.
Recipe octet_int8_training(bool hadamard, bool smooth_q) {
  Recipe r = octet_int8_f16(hadamard, smooth_q);
  r.logits.smooth_k = kTile;
  r.v = per_token(OCTET_I8);
  r.smooth_v = true;
  return r;
}

Recipe octet_int8_fp8(bool hadamard, bool smooth_q) {
  Recipe r;
  r.tile = kStep;
  r.logits = int8_logits(hadamard, smooth_q);
  r.logits.k = keys_of_a_thread(OCTET_I8);
  r.p = fixed(OCTET_E4M3, 448.0);
  r.sum_rounded_p = true;
  r.v = per_channel(OCTET_E4M3);
  return r;
}

Recipe octet_fp8() {
  Recipe r;
  r.tile = kStep;
  r.logits = {.q = per_token(OCTET_E4M3), .k = per_token(OCTET_E4M3), .smooth_k = kAllTokens};
  r.p = fixed(OCTET_E4M3, 448.0);
  r.sum_rounded_p = true;
  r.v = per_channel(OCTET_E4M3);
  r.backward = {.logits = {.q = per_tensor(OCTET_E4M3), .k = per_tensor(OCTET_E4M3), .smooth_k = kAllTokens},
                .recompute = true,
                .delta = OCTET_DELTA_FROM_P,
                .v = cast(OCTET_BF16),
                .do_dp = cast(OCTET_BF16),
                .ds_q = tile(OCTET_E4M3, kTile, kTile),
                .ds_k = tile(OCTET_E4M3, kTile, kTile),
                .p = {.format = OCTET_E4M3, .factor = 256.0},
                .do_dv = per_tensor(OCTET_E4M3)};
  return r;
}

Recipe helion_fp8() {
  Recipe r;
  r.tile = kStep;
  r.logits = {.q = cast(OCTET_E4M3), .k = cast(OCTET_E4M3)};
  r.p = fixed(OCTET_E4M3);
  r.v = cast(OCTET_E4M3);
  return r;
}

Recipe sagebwd() {
  Recipe r;
  r.logits = {.q = per_block(OCTET_I8, 128), .k = per_block(OCTET_I8, 64), .smooth_k = kAllTokens};
  r.p = largest(OCTET_I8);
  r.v = per_block(OCTET_I8, 64);
  r.backward = {.logits = r.logits,
                .v = scaled_f16(),
                .do_dp = scaled_f16(),
                .ds_q = tile(OCTET_I8, kTile, kTile),
                .ds_k = tile(OCTET_I8, kTile, kTile),
                .p = tile(OCTET_I8, kTile, kTile),
                .do_dv = per_block(OCTET_I8, 64)};
  return r;
}

Recipe sage1() {
  Recipe r;
  r.logits = {.q = per_block(OCTET_I8, 128), .k = per_block(OCTET_I8, 64), .smooth_k = kAllTokens};
  r.p = fixed(OCTET_F16);
  r.v = cast(OCTET_F16);
  return r;
}

Recipe sage2() {
  Recipe r;
  r.logits = {.q = {OCTET_I8, Group::thread_q}, .k = {OCTET_I8, Group::thread_k}, .smooth_k = kAllTokens};
  r.p = fixed(OCTET_E4M3, 448.0);
  r.v = per_channel(OCTET_E4M3);
  return r;
}

Recipe sage2_int4() {
  Recipe r = sage2();
  r.logits.q.format = r.logits.k.format = OCTET_I4;
  r.logits.smooth_q = kQueryBlock;
  return r;
}

Recipe sage3() {
  Recipe r;
  r.logits = {.q = {.group = Group::nvfp4_dim},
              .k = {.group = Group::nvfp4_dim},
              .smooth_k = kAllTokens,
              .smooth_q = kQueryBlock};
  r.p = {.scale = PRecipe::Scale::nvfp4};
  r.v = {.group = Group::nvfp4_token};
  r.tile = 128;
  return r;
}

Recipe flash_attention_3_fp8() {
  Recipe r;
  r.logits = {.q = per_block(OCTET_E4M3, 128), .k = per_block(OCTET_E4M3, 128), .hadamard = true};
  r.p = fixed(OCTET_E4M3, 256.0);
  r.v = per_block(OCTET_E4M3, 128);
  return r;
}

Recipe recipe_of(const Problem& problem) {
  switch (problem.precision) {
    case OCTET_PRECISION_F32:
      return format_only(OCTET_F32);
    case OCTET_PRECISION_F16:
    case OCTET_PRECISION_BF16:
      return sixteen_bits(problem);
    case OCTET_PRECISION_INT8:
      return int8_of(problem);
    case OCTET_PRECISION_INT8_F16:
      return octet_int8_f16(problem.hadamard, problem.smooth_q);
    case OCTET_PRECISION_INT8_FP8:
      return octet_int8_fp8(problem.hadamard, problem.smooth_q);
    case OCTET_PRECISION_FP8:
      return octet_fp8();
    case OCTET_PRECISION_FP8_RAW:
      return helion_fp8();
    case OCTET_PRECISION_SAGEBWD:
      return sagebwd();
    default:
      return problem.rounding ? rounded(*problem.rounding) : format_only(OCTET_F64);
  }
}

bool keeps_exact_o(const Problem& p) {
  return p.o_residual.present() || p.o.dtype == OCTET_F32 || p.o.dtype == OCTET_F64;
}

const char* name(octet_precision v) { return v <= kLastPrecision ? kRows[v].name : "unknown"; }

std::string PrecisionSet::names(const char* last) const {
  std::string out;
  for (const Row& row : kRows) {
    if (!has(row.precision)) continue;
    const bool more = bits_ >> row.precision >> 1;
    out += text(out.empty() ? "" : more ? ", " : last, row.name);
  }
  return out;
}

bool supports(octet_precision precision, octet_pass pass) { return precisions_with(pass).has(precision); }
PrecisionSet precisions_with_bias_correction() {
  return precisions_where([](const Row& row) { return row.bias_correction; });
}
PrecisionSet precisions_with_int8_options() {
  return precisions_where([](const Row& row) { return row.int8_options; });
}
PrecisionSet precisions_with_e4m3_outputs() {
  return precisions_where([](const Row& row) { return row.e4m3_outputs; });
}

std::optional<std::string> missing_exact_output(const Problem& problem) {
  const bool reads = problem.pass == OCTET_BACKWARD && precisions_with_bias_correction().has(problem.precision) &&
                     (problem.bias_correction == OCTET_BIAS_CORRECTION_F16 ||
                      problem.bias_correction == OCTET_BIAS_CORRECTION_EXACT_DELTA);
  if (!reads || keeps_exact_o(problem)) return std::nullopt;
  return text("bias_correction ", name(problem.bias_correction), " needs the un-rounded output, but o is ",
              name(problem.o.dtype),
              " and o_residual is NULL; pass o_residual (the forward pass writes it), or keep o in f32");
}

std::optional<std::string> unsupported_reason(const Problem& problem) {
  if (!supports(problem.precision, problem.pass))
    return text("precision ", name(problem.precision), " has no ", name(problem.pass),
                problem.pass == OCTET_JVP ? "" : " pass", "; those that have: ", precisions_with(problem.pass).names());
  if (auto reason = missing_exact_output(problem)) return reason;
  if (problem.rounding && problem.pass == OCTET_JVP)
    return "rounding: octet_rounding has no points for the jvp; it describes forward and backward";
  return std::nullopt;
}

std::optional<std::string> smooth_q_unsupported_reason(const Problem& problem) {
  if (!problem.smooth_q) return std::nullopt;
  return "smooth_q is on; it takes auto and off, the reference backend and sm80 take on too";
}

}  // namespace octet
