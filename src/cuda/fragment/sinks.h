// Learnable sinks: an additional logit for every query of a head, with a value of 0.
#pragma once
#include <cmath>
#include <cstdint>

namespace octet::cuda {

struct Sinks {
  const float* data;  // [batch, head]; null: there are none
  int64_t batch_stride, head_stride;

  // Returns -inf where there is no sink.
  __device__ float at(int64_t batch, int64_t head) const {
    return data ? data[batch * batch_stride + head * head_stride] : -INFINITY;
  }
};

}  // namespace octet::cuda
