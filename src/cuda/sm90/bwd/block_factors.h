// The consumers need these of a block of keys besides its operands. One thread computes them while the block before is
// computed: between two blocks, loads and arithmetic have no products to run beside.
#pragma once
#include "cuda/bwd/schedule.h"
#include "cuda/sm90/bwd/mask.h"

namespace octet::cuda::sm90 {

// A factor that may lie beyond the range of floats: the product of two, of which the second is nearly always 1.
struct WideFactor {
  float first, second;

  // scale 2^exponent
  static __device__ WideFactor of(float scale, int exponent) {
    const int most = exponent < -100 || exponent > 100 ? exponent / 2 : exponent;
    return {scale * exp2f(static_cast<float>(most)), exp2f(static_cast<float>(exponent - most))};
  }
  template <int Columns>
  __device__ void apply(Accumulator<Columns>& x) const {
    x.scale(first);
    if (second != 1.f) x.scale(second);
  }
};

struct BlockFactors {
  float logits;       // brings products of q and k to the base 2
  float product;      // brings products of do and v to the scale of delta
  float ds, dq;       // bring ds and dq to the exponents of the head's first bin
  WideFactor dk, dv;  // bring sums to gradients
  UnmaskedIterations unmasked;
  int iterations;
  bool passes_first;  // no query of the first tile sees a key of the block's second half
  bool usual;         // ds and dq have the exponents of the head's first bin, and ALiBi has gentle terms
};

}  // namespace octet::cuda::sm90
