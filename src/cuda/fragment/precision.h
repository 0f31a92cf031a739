// The precisions: what the two products of attention multiply.
//
// A precision with P of 16 bits (sm90/fwd/mainloop.h) is a type with
//   Operand  elements of q and k in shared memory; int8 are quantized values with a scale for each query and each key
//   Sum      of their products
//   Weight   elements of p and v                         kWeightExponent  p is rounded times 2 to this power
//   kLargestWeight  up to where P over an old maximum are kept, the rounded ones and their sums in a thread
//
// A precision with P of 8 bits (sm90/fwd/mainloop_8bit.h) is a type with
//   Quantized     of q and k, with a scale for each query; Sum of their products
//   kKeyScales  the scales of keys: none, one for each token, or one for each group of tokens
//   Weight   quantized values of P        Value  quantized values of v
//   kScaled  p times the token's scale of v is rounded on the scale of its largest in a tile, for each query; else p is
//            rounded as it is, kStart at the largest of a row's first tile, and v has a scale for each channel
//   kSumRounded  l adds the rounded p, else p
#pragma once
#include <type_traits>

#include "cuda/fragment/accumulator.h"
#include "cuda/ptx/types.h"

namespace octet::cuda {

struct PrecisionBf16 {
  using Operand = Bf16;
  using Sum = float;
  using Weight = Bf16;
  static constexpr int kWeightExponent = 0;
  static constexpr float kLargestWeight = 0x1p10f;  // as o = p v must not overflow before it is divided by l
};

// f16 holds numbers from 2^-14 on with 11 bits, smaller ones to within 2^-25: 2^7 keeps p precise down to 2^-21, and to
// within 2^-32.
struct PrecisionF16 {
  using Operand = F16;
  using Sum = float;
  using Weight = F16;
  static constexpr int kWeightExponent = 7;
  static constexpr float kLargestWeight = 0x1p15f;
};

// Bias correction f16: logits of bf16 q and k, P and V in f16.
struct PrecisionBf16F16Compute : PrecisionF16 {
  using Operand = Bf16;
};

// Tensor cores truncate sums, towards 0. Where o is kept for a backward pass, what that takes from it must not lean to
// one side, or errors of delta would add up: values come less a vector near them, and half way through its keys o is
// sign-flipped, where shared memory has room (sm90/fwd/mainloop.h).
template <class Precision>
constexpr bool kCompensated = std::is_same_v<Precision, PrecisionBf16F16Compute>;

// Logits of int8 quantized values, P and V in f16.
struct PrecisionInt8F16 : PrecisionF16 {
  using Operand = S8;
  using Sum = int;
};

// A precision with bias correction beta (fragment/softmax.h).
template <class Precision>
struct WithBeta : Precision {};
template <class Precision>
constexpr bool kHasBeta = false;
template <class Precision>
constexpr bool kHasBeta<WithBeta<Precision>> = true;

// Thread groups of tokens of a key sequence (SageAttention 2, arXiv 2411.10958, 3.2): of each block of 64, counted from
// its first, group c has those that the threads c of a quad hold in an accumulator, 8 i + 2 c and the next.
constexpr int kGroupBlock = 64, kScaleGroups = 4, kGroupTokens = kGroupBlock / kScaleGroups;
enum class KeyScales { none, tokens, groups };

struct PrecisionInt8 {
  using Quantized = S8;
  using Sum = int;
  using Weight = U8;
  using Value = S8;
  static constexpr bool kScaled = true, kSumRounded = false;
  static constexpr KeyScales kKeyScales = KeyScales::tokens;
};

struct PrecisionInt8Fp8 {
  using Quantized = S8;
  using Sum = int;
  using Weight = E4m3;
  using Value = E4m3;
  static constexpr float kStart = 448.f / 8.f;
  static constexpr bool kScaled = false, kSumRounded = true;
  static constexpr KeyScales kKeyScales = KeyScales::groups;
};

struct PrecisionFp8 {
  using Quantized = E4m3;
  using Sum = float;
  using Weight = E4m3;
  using Value = E4m3;
  static constexpr float kStart = 448.f / 8.f;
  static constexpr bool kScaled = false, kSumRounded = true;
  static constexpr KeyScales kKeyScales = KeyScales::tokens;
};

// Keys that came as e4m3.
struct PrecisionFp8Prequantized : PrecisionFp8 {
  static constexpr KeyScales kKeyScales = KeyScales::none;
};

struct PrecisionFp8Unscaled : PrecisionFp8Prequantized {
  static constexpr float kStart = 1.f;
  static constexpr bool kSumRounded = false;
};

// Whether q k^T is a product of int8_qk.
template <class Precision>
constexpr bool kIntegerLogits = std::is_same_v<typename Precision::Sum, int>;

}  // namespace octet::cuda
