// The scales of the tokens of v in the form in which P in 8 bits reads them.
#pragma once
#include <cfloat>

#include "cuda/operands/quantize/quantize.h"

namespace octet::cuda {

// Writes the logarithms of the scales of a tile of keys, and their inverses behind them (QuantizeParams::v_scale). A
// scale of 0 is replaced by one that is small beside the others.
__device__ inline void write_value_scales(const float* scales, int keys, float* to, int threads) {
  float most = 0.f;
  for (int i = 0; i < keys; ++i) most = fmaxf(most, scales[i]);
  const float least = most == 0.f ? 1.f : fmaxf(most * 0x1p-40f, FLT_MIN);  // so that its inverse is finite
  for (int i = threadIdx.x; i < keys; i += threads) {
    const float scale = scales[i] == 0.f ? least : scales[i];
    to[i] = log2f(scale);
    to[keys + i] = isnan(scale) ? 0.f : __frcp_rn(scale) * kInverseScale;
  }
}

}  // namespace octet::cuda
