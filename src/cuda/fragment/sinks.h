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

// The row sum of P with a sink, from the base-2 logarithms of both parts. Either may be far above the other; `keys` is
// -inf where a row sees no key.
struct RowWithSink {
  float log2_sum;  // log2 of the sum over keys and sink
  float share;     // the fraction of the sum that belongs to the keys
};
__device__ inline RowWithSink with_sink(float keys, float sink) {
  if (sink == -INFINITY) return {keys, 1.f};
  const float apart = sink - keys;
  return {fmaxf(keys, sink) + log2f(1.f + exp2f(-fabsf(apart))), 1.f / (1.f + exp2f(apart))};
}

}  // namespace octet::cuda
