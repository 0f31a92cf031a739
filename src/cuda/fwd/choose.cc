#include "cuda/fwd/choose.h"

namespace octet::cuda {

ForwardNumerics forward_numerics(const Problem& p) {
  if (p.rounding) return {};  // any rounding points, which no kernel has
  const Recipe r = recipe_of(p);
  return {{r.logits.q.format, r.logits.k.group, r.p.format, r.v.format, r.v.group},
          static_cast<float>(r.beta),
          static_cast<float>(r.beta_limit)};
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
