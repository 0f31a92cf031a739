// The end of a row of softmax: lse, and the share of its probabilities that a sink leaves the keys.
#pragma once
#include <cmath>

namespace octet::cuda {

constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147180559945f;

// The sum of exp(logit) over the keys that a row sees: 2^log2 e^row_bias. row_bias is a number common to the logits of
// the row that the kernel leaves out of them. kBiased is false for kernels whose logits are whole: row_bias is 0.
template <bool kBiased = true>
struct RowSum {
  float log2, row_bias;

  // Returns the sum 2^origin l e^row_bias, or 0 where l is 0, whatever the others are.
  static __device__ RowSum of(float origin, float l, float row_bias) {
    return {l == 0.f ? -INFINITY : origin + log2f(l), l == 0.f ? 0.f : row_bias};
  }
  __device__ float lse() const { return kBiased ? __fmaf_rn(log2, kLn2, row_bias) : log2 * kLn2; }

  // Adds exp(sink) to the sum, and returns the share of the keys in it. Either may be far above the other.
  __device__ float add_sink(float sink) {
    const float of_sink = __fmul_rn(sink, kLog2e), of_keys = kBiased ? __fmaf_rn(row_bias, kLog2e, log2) : log2;
    *this = {of_keys, 0.f};
    if (of_sink == -INFINITY) return 1.f;
    const float apart = of_sink - of_keys;
    log2 = fmaxf(of_keys, of_sink) + log2f(1.f + exp2f(-fabsf(apart)));
    return 1.f / (1.f + exp2f(apart));
  }
};

}  // namespace octet::cuda
