#include "core/prequantized.h"

#include <algorithm>
#include <iterator>

namespace octet {
namespace {

// Returns whether a tensor came in `format`, int8 also as uint8, with a scale for each token, block or head and, of
// integers, an integer zero point.
bool plain_quantized(const View& t, octet_dtype format) {
  const bool integers = format == OCTET_I8 && (t.dtype == OCTET_I8 || t.dtype == OCTET_U8);
  if (!integers && !(format == OCTET_E4M3 && t.dtype == OCTET_E4M3)) return false;
  return !t.quantization || (t.quantization->zero_point_kind != OCTET_ZERO_POINT_FLOAT &&
                             t.quantization->granularity != OCTET_PER_CHANNEL);
}

bool has_mean(const View& t) { return t.quantization && t.quantization->mean; }

View view_of(const octet_tensor* t) {
  View view;
  if (!t) return view;
  view.dtype = static_cast<octet_dtype>(t->dtype), view.data = t->data;
  std::copy(std::begin(t->shape), std::end(t->shape), view.shape);
  std::copy(std::begin(t->stride), std::end(t->stride), view.stride);
  return view;
}

}  // namespace

Prequantized prequantized_operands(const Problem& p, const Recipe& recipe) {
  const Quantizer &of_q = recipe.logits.q, &of_k = recipe.logits.k, &of_v = recipe.v;
  const bool q = plain_quantized(p.q, of_q.format) && !has_mean(p.q), k = plain_quantized(p.k, of_q.format);
  const bool one_frame = q && k ? rotation_seed(p.q) == rotation_seed(p.k)
                                : of_q.format == OCTET_E4M3 && !rotation_seed(p.q) && !rotation_seed(p.k);
  return {.q = q && one_frame && of_q.group != Group::cast,
          .k = k && one_frame && of_k.group != Group::cast,
          .v = (of_v.group == Group::token || of_v.group == Group::block) && plain_quantized(p.v, of_v.format) &&
               !rotation_seed(p.v)};
}

bool has_zero_points(const View& t) {
  return t.dtype == OCTET_U8 || (t.quantization && t.quantization->zero_point_kind == OCTET_ZERO_POINT_INTEGER);
}

uint64_t rotation_seed(const View& t) { return t.quantization ? t.quantization->hadamard_seed : 0; }

Quantization quantization_of(const View& codes) {
  const octet_quantization& how = *codes.quantization;
  return {.operand = static_cast<octet_operand>(how.operand),
          .granularity = static_cast<octet_granularity>(how.granularity),
          .zero_point_kind = static_cast<octet_zero_point>(how.zero_point_kind),
          .block = how.block,
          .hadamard_seed = how.hadamard_seed,
          .scale = view_of(how.scale),
          .zero_point = view_of(how.zero_point),
          .mean = view_of(how.mean)};
}

}  // namespace octet
