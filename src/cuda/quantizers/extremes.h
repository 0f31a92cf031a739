// Extremes that several thread blocks find: they lie where scales and zero points will be until the codes are written.
#pragma once
#include "cuda/quantizers/codes.h"

namespace octet::cuda::quantizers {

// Extremes in the memory of a scale and its zero point; symmetric ones are amax alone, and none is the least integer.
__device__ inline void clear_extremes(const QuantizeParams& p, const BatchHead& i, int group, int channel) {
  const Extremes none;
  *at<int32_t>(p.how.scale, i, group, channel) = none.high;
  if (!p.symmetric()) *at<int32_t>(p.how.zero_point, i, group, channel) = none.low;
}
__device__ inline void raise_extremes(const QuantizeParams& p, const BatchHead& i, int group, int channel,
                                      const Extremes& e) {
  if (e.empty()) return;
  atomicMax(at<int32_t>(p.how.scale, i, group, channel), e.high);
  if (!p.symmetric()) atomicMin(at<int32_t>(p.how.zero_point, i, group, channel), e.low);
}
__device__ inline AffineScale scale_of_extremes(const QuantizeParams& p, const BatchHead& i, int group, int channel) {
  Extremes e;
  e.high = *at<int32_t>(p.how.scale, i, group, channel);
  if (!p.symmetric())
    e.low = *at<int32_t>(p.how.zero_point, i, group, channel);
  else if (e.high != Extremes().high)
    e.low = e.high;
  return affine_scale_of(e, p.how.zero_point_kind, p.range);
}

}  // namespace octet::cuda::quantizers
