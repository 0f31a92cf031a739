// The recipe of a forward pass, in the terms of the kernels of both architectures.
#pragma once
#include <optional>
#include <string>

#include "core/prequantized.h"
#include "core/problem.h"

namespace octet::cuda {

// These tell the recipes of kernels apart: the formats of q and k, of P and of v, and what shares a scale of k and of
// v.
struct ForwardFormats {
  octet_dtype qk;
  Group k_scale;
  octet_dtype p, v;
  Group v_scale;
  bool has_8bit_qk() const { return qk == OCTET_I8 || qk == OCTET_E4M3; }
  friend bool operator==(const ForwardFormats&, const ForwardFormats&) = default;
};
constexpr ForwardFormats kF32{OCTET_F32, Group::cast, OCTET_F64, OCTET_F32, Group::cast},  // P has the format of sums
    kF16{OCTET_F16, Group::cast, OCTET_F16, OCTET_F16, Group::cast},
    kBf16{OCTET_BF16, Group::cast, OCTET_BF16, OCTET_BF16, Group::cast},
    kBf16F16Compute{OCTET_BF16, Group::cast, OCTET_F16, OCTET_BF16, Group::cast},  // v becomes f16, less its mean
    kInt8F16{OCTET_I8, Group::token, OCTET_F16, OCTET_F16, Group::power_of_two},
    kInt8Training{OCTET_I8, Group::token, OCTET_F16, OCTET_I8, Group::token},  // v becomes f16, less its mean
    kInt8{OCTET_I8, Group::token, OCTET_U8, OCTET_I8, Group::token},
    kSagebwd{OCTET_I8, Group::block, OCTET_I8, OCTET_I8, Group::block},
    kInt8Fp8{OCTET_I8, Group::thread_k, OCTET_E4M3, OCTET_E4M3, Group::channel},
    kFp8{OCTET_E4M3, Group::token, OCTET_E4M3, OCTET_E4M3, Group::channel},
    kFp8Raw{OCTET_E4M3, Group::cast, OCTET_E4M3, OCTET_E4M3, Group::cast};

// Returns whether kernels of sm80 have dropout. Those of int8 subtract a mean from v, to which a row of P has to sum to
// 1; those with P of e4m3 have none either.
inline bool has_dropout(const ForwardFormats& x) { return !x.has_8bit_qk() || x == kInt8F16; }

struct ForwardNumerics {
  ForwardFormats formats;
  Prequantized came;       // the operands that a forward pass takes as they came
  float beta, beta_limit;  // of bias correction beta, the limit in logits; beta 0: another one

  bool f16_p_and_v() const { return formats == kBf16F16Compute; }
  // Returns whether v becomes f16 and is divided by a power of two for each head: numbers of bf16 and f32 that f16 may
  // not hold. An f16 v stays as it is, and f16 represents all values of e4m3.
  bool scales_v(octet_dtype v) const {
    return f16_p_and_v() || (formats == kInt8F16 && (v == OCTET_BF16 || v == OCTET_F32));
  }
  // The type of 16-bit operands.
  octet_dtype type() const { return formats.qk == OCTET_BF16 ? OCTET_BF16 : OCTET_F16; }
  // Returns whether sm80 has kernels that split keys.
  bool splits_keys() const {
    return (formats == kF32 || formats == kF16 || formats == kBf16 || formats == kInt8F16) && !beta;
  }
};
ForwardNumerics forward_numerics(const Problem& p);

// Returns the reason why q, k or v of a recipe cannot come quantized as it is: fp8 takes e4m3 with a scale for each
// head.
std::optional<std::string> input_unsupported_reason(const Problem& p, const ForwardFormats& formats);

// Returns the precisions for which `has` is true of the formats that a problem's forward pass would have.
PrecisionSet precisions_whose(const Problem& p, bool (*has)(const ForwardFormats&));

}  // namespace octet::cuda
