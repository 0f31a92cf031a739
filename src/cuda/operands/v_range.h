// How numbers of v fill f16 after they are divided by a power of two for each head.
#pragma once

namespace octet::cuda {

// A head stays as it is where its largest magnitude is in [2^-2, 2^top) and typical ones, of the tokens of a sample,
// are above 2^-11, as f16 loses bits below 2^-14. Else the largest comes into [2^(top - margin), 2^(top - margin + 1)),
// or typical magnitudes to 2^typical if that factor is larger. Then numbers that reach 2^limit are infinite, instead of
// taking all bits from the others.
struct VRange {
  // All of f16, where products are summed in float32: infinite is what f16 does not hold.
  int top = 15, margin = 2, typical = -11, limit = 16;
};
// The range of v for kernels that sum at most 64 products of P and v in f16. Numbers of f16 below 2^-14 are 2^-24
// apart.
constexpr VRange kRangeOfF16Sums{.top = 7, .margin = 1, .typical = -15, .limit = 7};

}  // namespace octet::cuda
