// The parameters of tensors that came quantized.
#pragma once
#include "core/quantization.h"

namespace octet::cuda {

// Returns a number of a scale, a zero point or a mean.
__device__ inline float parameter_of(const View& x, int64_t batch, int64_t head, int64_t group, int64_t channel) {
  return static_cast<const float*>(
      x.data)[batch * x.stride[0] + head * x.stride[1] + group * x.stride[2] + channel * x.stride[3]];
}

}  // namespace octet::cuda
