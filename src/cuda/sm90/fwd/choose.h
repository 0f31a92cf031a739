// The kernel of a forward pass on Hopper, chosen from its recipe, and what the recipe asks of the launch.
#pragma once
#include "cuda/fwd/choose.h"
#include "cuda/operands/quantize/quantize.h"
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

struct ForwardChoice {
  Kernel kernel;
  ForwardNumerics numerics;
  bool p_8bit;        // P and v have 8 bits; else 16
  bool quantizes_qk;  // P of 16 bits: q and k become int8
  bool scales_v;      // P of 16 bits: v becomes f16, divided by a power of two per head
  // P of 8 bits: what q, k and v become; none: e4m3, cast or as it came
  QuantizedFormat q, k, v;
  bool k_groups;      // thread groups of k share a scale
  bool v_by_tokens;   // tokens of v have scales, which change from tile to tile
  bool v_by_channel;  // channels of v do
};
ForwardChoice choose_forward(const Problem& p, const ForwardNumerics& numerics);

}  // namespace octet::cuda::sm90
