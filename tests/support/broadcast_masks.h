// Masks that are added to the logits, of every broadcast, for tests of their gradients.
#pragma once
#include <limits>

#include "support/cases.h"

namespace octet::test {

constexpr double kHidden = -std::numeric_limits<double>::infinity();

// One mask for every subset of dimensions that it broadcasts, bit i for dimension i.
constexpr int kBroadcasts = 16;

inline Shape mask_shape(const Case& c, int broadcast) {
  Shape shape{c.batch, c.heads, c.tokens_q, c.tokens_k};
  for (size_t i = 0; i < 4; ++i)
    if (broadcast >> i & 1) shape[i] = 1;
  return shape;
}

// The inputs of a case with such a mask in f32, of which a tenth is -inf.
inline Inputs with_mask(const Case& c, uint64_t seed, int broadcast) {
  Inputs in = draw(c, seed);
  in.mask_dtype = DType::f32;
  in.mask = rounded(normal(mask_shape(c, broadcast), 100 * seed + 50 + static_cast<uint64_t>(broadcast)), DType::f32);
  for (double& x : in.mask.data)
    if (x > 1.28) x = kHidden;
  return in;
}

}  // namespace octet::test
