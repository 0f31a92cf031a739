// The 16-bit precisions: what the two products of attention multiply.
//
// A precision is a type with
//   Operand  elements of q and k in shared memory        Logits  their product's accumulator
//   Weight   elements of p and v                         kWeightExponent  p is rounded times 2 to this power
//   kLargestWeight  up to where weights over an old maximum are kept, the rounded ones and their sums in a thread
// The forward mainloop is written over it; docs/hopper.md shows how an 8-bit one fits.
#pragma once
#include "cuda/ptx/types.h"
#include "cuda/tile/fragment.h"

namespace octet::cuda {

struct PrecisionBf16 {
  using Operand = Bf16;
  using Weight = Bf16;
  static constexpr int kWeightExponent = 0;
  static constexpr float kLargestWeight = 0x1p10f;  // as o = p v must not overflow before it is divided by l
};

// f16 holds numbers from 2^-14 on with 11 bits, smaller ones to within 2^-25: 2^7 keeps p precise down to 2^-21, and to
// within 2^-32.
struct PrecisionF16 {
  using Operand = F16;
  using Weight = F16;
  static constexpr int kWeightExponent = 7;
  static constexpr float kLargestWeight = 0x1p15f;
};

// Remedy f16_inside: logits of bf16 q and k, weights and values in f16.
struct PrecisionBf16Inside {
  using Operand = Bf16;
  using Weight = F16;
  static constexpr int kWeightExponent = PrecisionF16::kWeightExponent;
  static constexpr float kLargestWeight = PrecisionF16::kLargestWeight;
};

// A precision with remedy beta (attn/softmax.h).
template <class Precision>
struct WithBeta : Precision {};
template <class Precision>
constexpr bool kHasBeta = false;
template <class Precision>
constexpr bool kHasBeta<WithBeta<Precision>> = true;

}  // namespace octet::cuda
