#include <cmath>
#include <utility>

#include "core/error.h"
#include "core/names.h"
#include "core/recipe.h"
#include "core/structs.h"
#include "core/validate_parts.h"

namespace octet {
namespace {

void validate_rounding(const octet_rounding& r) {
  expect_size(r, "octet_rounding");
  const std::pair<uint32_t, const char*> formats[] = {{r.qk, "qk"},       {r.v, "v"},
                                                      {r.s, "s"},         {r.m, "m"},
                                                      {r.arg, "arg"},     {r.p, "p"},
                                                      {r.alpha, "alpha"}, {r.acc, "acc"},
                                                      {r.o, "o"},         {r.o_saved, "o_saved"},
                                                      {r.ds, "ds"},       {r.p_backward, "p_backward"}};
  for (const auto& [format, field] : formats) checked(format, OCTET_F64, OCTET_E5M2, "rounding: ", field);
  checked(r.delta, OCTET_DELTA_FROM_O, OCTET_DELTA_FROM_P, "rounding: ", "delta");
  for (const auto& [flag, field] : {std::pair{r.s_scaled, "s_scaled"}, {r.l_from_p, "l_from_p"}})
    if (flag > 1) invalid("rounding: ", field, ": found ", flag, ", allowed: 0, 1");
  if (r.beta != 0.f && !(r.beta > 1.f && r.beta <= 8.f))
    invalid("rounding: beta: found ", r.beta, ", allowed: above 1, at most 8, or 0 for none");
  if (!(r.tie_epsilon >= 0.f) || !std::isfinite(r.tie_epsilon))
    invalid("rounding: tie_epsilon: found ", r.tie_epsilon, ", allowed: finite, at least 0");
}

}  // namespace

void validate_recipe(const octet_attention& a, Problem& p) {
  p.bias_correction =
      checked(a.bias_correction, OCTET_BIAS_CORRECTION_F16, OCTET_BIAS_CORRECTION_GPROJ, "bias_correction");
  const PrecisionSet with_bias_correction = precisions_with_bias_correction(),
                     with_int8_options = precisions_with_int8_options();
  if (!with_bias_correction.has(p.precision) && p.bias_correction != OCTET_BIAS_CORRECTION_F16)
    invalid("bias_correction: ", name(p.bias_correction), " given with precision ", name(p.precision),
            "; bias corrections are for ", with_bias_correction.names(" and "));
  p.beta = a.beta == 0.f ? 3.f : a.beta;
  if (a.beta != 0.f && p.bias_correction != OCTET_BIAS_CORRECTION_BETA)
    invalid("beta: ", a.beta, " given with bias_correction ", name(p.bias_correction),
            "; it belongs to bias_correction beta");
  if (!(p.beta >= 2.f && p.beta <= 8.f)) invalid("beta: found ", a.beta, ", allowed: 2 to 8, or 0 for 3");
  const bool int8_logits = with_int8_options.has(p.precision);
  const auto hadamard = checked(a.hadamard, OCTET_AUTO, OCTET_OFF, "hadamard");
  const auto smooth_q = checked(a.smooth_q, OCTET_AUTO, OCTET_OFF, "smooth_q");
  if (!int8_logits && (hadamard != OCTET_AUTO || smooth_q != OCTET_AUTO))
    invalid(hadamard != OCTET_AUTO ? "hadamard" : "smooth_q", ": given with precision ", name(p.precision),
            "; it belongs to ", with_int8_options.names(" and "));
  p.hadamard = int8_logits && hadamard != OCTET_OFF;
  p.smooth_q = smooth_q == OCTET_ON;
  if (a.deterministic > 1) invalid("deterministic: found ", a.deterministic, ", allowed: 0, 1");
  p.deterministic = a.deterministic;
  if (a.threads > 4096) invalid("threads: found ", a.threads, ", allowed: 0 (all) to 4096");
  p.threads = a.threads;
  p.rounding = a.rounding;
  if (a.rounding) {
    if (p.precision != OCTET_PRECISION_F64)
      invalid("rounding: given with precision ", name(p.precision), "; it belongs to precision f64");
    validate_rounding(*a.rounding);
  }
}

}  // namespace octet
