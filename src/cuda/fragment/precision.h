// Precisions: the operand types of the two products of attention.
//
// A precision with P of 16 bits (sm90/fwd/mainloop.h) is a type with
//   QkType     element type of q and k in shared memory; s8 holds quantized values with a scale for each token
//   Sum        type of the sums of q k^T
//   PType      element type of P and v
//   kPExponent P is multiplied by 2^kPExponent before it is rounded
//   kMaxP      P over a stale maximum are kept while they, and their sums in a thread, are at most this
//
// A precision with P of 8 bits (sm90/fwd/mainloop_8bit.h) is a type with
//   QkType      type of the quantized values of q and k; q has a scale for each token
//   Sum         type of the sums of q k^T
//   kKeyScales  the scales of k: none, one for each token, or one for each thread group of tokens
//   PType       type of the quantized values of P
//   VType       type of the quantized values of v
//   kScaled     true: P times the scale of its token of v is quantized with one scale for each query and tile;
//               false: P is rounded without a scale, kStart being the largest of a row's first tile, and v has a scale
//               for each channel
//   kSumRounded true: l sums the rounded P; false: l sums P before rounding
#pragma once
#include <type_traits>

#include "cuda/fragment/accumulator.h"
#include "cuda/ptx/types.h"

namespace octet::cuda {

struct PrecisionBf16 {
  using QkType = Bf16;
  using Sum = float;
  using PType = Bf16;
  static constexpr int kPExponent = 0;
  static constexpr float kMaxP = 0x1p10f;  // o = P v must not overflow before it is divided by l
};

// f16 holds numbers from 2^-14 on with 11 bits, and smaller ones to within 2^-25. The factor 2^7 gives P 11 bits down
// to 2^-21, and an error of at most 2^-32 below.
struct PrecisionF16 {
  using QkType = F16;
  using Sum = float;
  using PType = F16;
  static constexpr int kPExponent = 7;
  static constexpr float kMaxP = 0x1p15f;
};

// Bias correction f16: q and k in bf16, P and v in f16.
struct PrecisionBf16F16Compute : PrecisionF16 {
  using QkType = Bf16;
};

// f32: each number is the sum of two f16 halves (sm80/f16_halves.h). P of a row and tile have a scale of their own.
struct PrecisionF32 : PrecisionF16 {
  static constexpr int kPExponent = 0;
};
// Tensor cores truncate sums towards 0. Where o is kept for a backward pass, this error must not be biased, or the
// errors of delta would add up: V is centred by its mean, and half way through its keys o is sign-flipped, where shared
// memory has room (sm90/fwd/mainloop.h).
template <class Precision>
constexpr bool kCompensated = std::is_same_v<Precision, PrecisionBf16F16Compute>;

// q and k as int8 quantized values, P and v in f16.
struct PrecisionInt8F16 : PrecisionF16 {
  using QkType = S8;
  using Sum = int;
};

// The same where P v of a tile of keys is summed in f16, before it is added to o in float32. P is not multiplied by a
// power of two. Instead of kMaxP it has
//   kMaxRowSum   P of a row over a stale maximum are kept while they sum to no more than this in a tile
struct PrecisionInt8F16Sums : PrecisionInt8F16 {
  static constexpr int kPExponent = 0;
  static constexpr float kMaxRowSum = 480.f;
};

// The same where o is kept for a backward pass: k is centred by the means of blocks, and v comes from int8.
struct PrecisionInt8Training : PrecisionInt8F16 {};

// A precision with bias correction beta (fragment/softmax.h).
template <class Precision>
struct WithBeta : Precision {};
template <class Precision>
constexpr bool kHasBeta = false;
template <class Precision>
constexpr bool kHasBeta<WithBeta<Precision>> = true;

// A precision with dropout (fragment/dropout.h). V keeps its mean, as a row of P does not sum to 1.
template <class Precision>
struct WithDropout : Precision {};
template <class Precision>
constexpr bool kHasDropout = false;
template <class Precision>
constexpr bool kHasDropout<WithDropout<Precision>> = true;
template <class Precision>
constexpr bool kCompensated<WithDropout<Precision>> = kCompensated<Precision>;

// Thread groups of the tokens of k (SageAttention 2, arXiv 2411.10958, 3.2). Of each block of 64 tokens, counted from
// the first, group c has the columns that thread c of each quad holds in an accumulator: 8 i + 2 c and the next.
constexpr int kGroupBlock = 64, kScaleGroups = 4, kGroupTokens = kGroupBlock / kScaleGroups;
enum class KeyScales { none, tokens, groups };

struct PrecisionInt8 {
  using QkType = S8;
  using Sum = int;
  using PType = U8;
  using VType = S8;
  static constexpr bool kScaled = true, kSumRounded = false;
  static constexpr KeyScales kKeyScales = KeyScales::tokens;
};

struct PrecisionInt8Fp8 {
  using QkType = S8;
  using Sum = int;
  using PType = E4m3;
  using VType = E4m3;
  static constexpr float kStart = 448.f / 8.f;
  static constexpr bool kScaled = false, kSumRounded = true;
  static constexpr KeyScales kKeyScales = KeyScales::groups;
};

struct PrecisionFp8 {
  using QkType = E4m3;
  using Sum = float;
  using PType = E4m3;
  using VType = E4m3;
  static constexpr float kStart = 448.f / 8.f;
  static constexpr bool kScaled = false, kSumRounded = true;
  static constexpr KeyScales kKeyScales = KeyScales::tokens;
};

// Prequantized: k is given in e4m3 and has no scale for each token.
struct PrecisionFp8Prequantized : PrecisionFp8 {
  static constexpr KeyScales kKeyScales = KeyScales::none;
};

struct PrecisionFp8Unscaled : PrecisionFp8Prequantized {
  static constexpr float kStart = 1.f;
  static constexpr bool kSumRounded = false;
};

// True where the sums of q k^T are integers.
template <class Precision>
constexpr bool kIntegerLogits = std::is_same_v<typename Precision::Sum, int>;

}  // namespace octet::cuda
