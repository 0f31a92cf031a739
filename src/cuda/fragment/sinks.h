// Learnable sinks: one more logit of every query of a head, whose value is 0.
#pragma once
#include <cmath>
#include <cstdint>

namespace octet::cuda {

struct Sinks {
  const float* data;  // [batch, head]; null: there are none
  int64_t batch_stride, head_stride;

  // -inf: none.
  __device__ float at(int64_t batch, int64_t head) const {
    return data ? data[batch * batch_stride + head * head_stride] : -INFINITY;
  }
};

// A row of P with a sink, from the logarithms of both, in base 2: either may be far above the other, and -inf
// where a row sees no key.
struct RowWithSink {
  float total;  // the logarithm of the sum of all P
  float share;  // that keys have of this sum
};
__device__ inline RowWithSink with_sink(float keys, float sink) {
  if (sink == -INFINITY) return {keys, 1.f};
  const float apart = sink - keys;
  return {fmaxf(keys, sink) + log2f(1.f + exp2f(-fabsf(apart))), 1.f / (1.f + exp2f(apart))};
}

}  // namespace octet::cuda
