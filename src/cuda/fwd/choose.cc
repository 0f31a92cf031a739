#include "cuda/fwd/choose.h"

#include <utility>

#include "core/error.h"
#include "core/names.h"

namespace octet::cuda {

ForwardNumerics forward_numerics(const Problem& p) {
  if (p.rounding) return {};  // any rounding points, which no kernel has
  const Recipe r = recipe_of(p);
  return {{r.logits.q.format, r.logits.k.group, r.p.format, r.v.format, r.v.group},
          prequantized_operands(p, r),
          static_cast<float>(r.beta),
          static_cast<float>(r.beta_limit)};
}

std::optional<std::string> input_unsupported_reason(const Problem& p, const ForwardFormats& formats) {
  for (const auto& [t, label] : {std::pair{&p.q, "q"}, {&p.k, "k"}, {&p.v, "v"}}) {
    const octet_quantization* how = t->quantization;
    if (!how) continue;
    if (formats != kFp8 || t->dtype != OCTET_E4M3)
      return text(label, " is quantized ", name(t->dtype), "; its ", name(p.precision),
                  " takes f32, f16, bf16 and e4m3 as they are, its fp8 also e4m3 with a scale per tensor");
    if (how->granularity != OCTET_PER_TENSOR || how->mean || how->hadamard_seed)
      return text(label, " is quantized e4m3 ", how->granularity != OCTET_PER_TENSOR ? "not per tensor" : "",
                  how->mean ? " with a mean" : "", how->hadamard_seed ? " with a rotation" : "",
                  "; it takes e4m3 with a scale per tensor and nothing else");
  }
  return {};
}

PrecisionSet precisions_whose(const Problem& p, bool (*has)(const ForwardFormats&)) {
  Problem other = p;
  other.rounding = nullptr;
  PrecisionSet set;
  for (int n = OCTET_PRECISION_F64; n <= kLastPrecision; ++n) {
    other.precision = static_cast<octet_precision>(n);
    if (has(forward_numerics(other).formats)) set = set | PrecisionSet{other.precision};
  }
  return set;
}

}  // namespace octet::cuda
