// The recipe of a problem (core/recipe.h) in the terms of the kernels.
#include "core/prequantized.h"
#include "cpu/attention/job.h"

namespace octet::cpu {
namespace {

// Operands that are not rounded are floats in the kernels.
octet_dtype element_type(octet_dtype format) { return format == OCTET_F64 ? OCTET_F32 : format; }

PFormat p_format(octet_dtype format) {
  switch (format) {
    case OCTET_F16:
      return PFormat::f16;
    case OCTET_BF16:
      return PFormat::bf16;
    case OCTET_E4M3:
      return PFormat::e4m3;
    case OCTET_U8:
    case OCTET_I8:  // p is not negative
      return PFormat::u8;
    default:
      return PFormat::exact;
  }
}

// Tokens that share a scale.
int64_t tokens_of(const Quantizer& q) {
  switch (q.group) {
    case Group::token:
    case Group::power_of_two:
      return 1;
    case Group::block:
      return q.block;
    case Group::tensor:
      return kWholeHead;
    case Group::thread_k:
      return kThreadGroups;
    default:
      return 0;
  }
}

VScale v_scale(Group group) {
  switch (group) {
    case Group::token:
    case Group::block:
      return VScale::token;
    case Group::channel:
      return VScale::channel;
    case Group::power_of_two:
      return VScale::power_of_two;
    default:
      return VScale::none;
  }
}

// At int8 the backward pass of the CPU reads neither o nor lse, so that its forward pass is the same for training.
Recipe forward_recipe(Problem p) {
  if (p.precision == OCTET_PRECISION_INT8) p.o_residual = {};
  return recipe_of(p);
}

ForwardNumerics numerics_of_recipe(const Problem& p) {
  const Recipe r = forward_recipe(p);
  ForwardNumerics numerics{.qk = element_type(r.logits.q.format),
                           .q_group = tokens_of(r.logits.q),
                           .k_group = tokens_of(r.logits.k),
                           .smooth_k = r.logits.smooth_k > 0,
                           .hadamard = r.logits.hadamard,
                           .v = element_type(r.v.format),
                           .v_scale = v_scale(r.v.group),
                           .smooth_v = r.smooth_v,
                           .p = p_format(p.pass == OCTET_JVP ? r.tangent : r.p.format),
                           .l_from_p = r.sum_rounded_p,
                           .beta = r.beta != 0.0,
                           .beta_limit = static_cast<float>(r.beta_limit)};
  if (numerics.v_scale == VScale::token) numerics.v_group = tokens_of(r.v);
  if (p.pass == OCTET_FORWARD)
    numerics.p_top = r.p.scale != PRecipe::Scale::largest ? static_cast<float>(r.p.factor)
                     : r.p.format == OCTET_U8             ? 255.f
                                                          : 127.f;
  // A maximum that many keys share saves time, where p has the range for it.
  if (r.tile == kStep) numerics.step_tiles = kStep / kKeys;
  return numerics;
}

}  // namespace

// Operands that come in the recipe's own form are not smoothed, rotated or rounded again.
ForwardNumerics forward_numerics(const Problem& p) {
  ForwardNumerics numerics = numerics_of_recipe(p);
  const Prequantized came = prequantized_operands(p, forward_recipe(p));
  numerics.q_prequantized = came.q, numerics.k_prequantized = came.k, numerics.v_prequantized = came.v;
  if (numerics.k_prequantized) numerics.smooth_k = p.k.quantization && p.k.quantization->mean;
  if (numerics.v_prequantized) numerics.smooth_v = p.v.quantization && p.v.quantization->mean;
  numerics.qk_zero_points =
      (numerics.q_prequantized && has_zero_points(p.q)) || (numerics.k_prequantized && has_zero_points(p.k));
  numerics.v_zero_points = numerics.v_prequantized && has_zero_points(p.v);
  return numerics;
}

namespace {

Rounding rounding_of(const Quantizer& q) { return {element_type(q.format), tokens_of(q)}; }

GradientFormat gradient_format(const TileRecipe& ds) {
  switch (ds.format) {
    case OCTET_F16:
      return GradientFormat::f16;
    case OCTET_BF16:
      return GradientFormat::bf16;
    case OCTET_E4M3:
      return GradientFormat::e4m3;
    case OCTET_I8:
      return GradientFormat::int8;
    default:
      return GradientFormat::exact;
  }
}

Delta delta_of(const BackwardRecipe& r) {
  if (r.delta == OCTET_DELTA_FROM_P) return Delta::from_p;
  return r.exact_o ? Delta::from_exact_o : Delta::from_o;
}

}  // namespace

BackwardNumerics backward_numerics(const Problem& p) {
  const BackwardRecipe r = recipe_of(p).backward;
  BackwardNumerics numerics{.q = rounding_of(r.logits.q),
                            .k = rounding_of(r.logits.k),
                            .smooth_k = r.logits.smooth_k == kAllTokens,
                            .smooth_k_dq = r.smooth_dq.has_value(),
                            .smooth_tiles = r.logits.smooth_k == kKeys,
                            .f16_q_dk = r.q_dk.has_value(),
                            .hadamard = r.logits.hadamard,
                            .v = rounding_of(r.v),
                            .do_dp = rounding_of(r.do_dp),
                            .smooth_v = r.smooth_v,
                            .do_dv = rounding_of(r.do_dv),
                            .format = gradient_format(r.ds_q),
                            .delta = delta_of(r),
                            .gproj = r.gproj == OCTET_F64 ? OCTET_DTYPE_NONE : r.gproj};
  // Operands that came in 8 bits are not quantized again.
  const auto prequantized = [](const View& x, const Rounding& r) {
    const octet_dtype integers = x.dtype == OCTET_U8 ? OCTET_I8 : x.dtype;
    return r.group && r.dtype == integers && x.dtype != OCTET_F16;
  };
  if (prequantized(p.q, numerics.q)) numerics.q = {};
  if (prequantized(p.k, numerics.k)) numerics.k = {}, numerics.smooth_k = numerics.smooth_tiles = false;
  if (prequantized(p.v, numerics.v)) numerics.v = {}, numerics.smooth_v = false;
  return numerics;
}

}  // namespace octet::cpu
