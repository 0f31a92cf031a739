// Rows of numbers to the words of operands (matmul.h).
#pragma once
#include "cpu/gemm/matmul.h"

namespace octet::cpu::OCTET_ISA {

// The words of one row of A (or one column of B): numbers as elements of the engine, plus its bias for signed A.
template <class E>
inline void encode_row(const float* x, int64_t n, int bias, Word* words) {
  auto* out = reinterpret_cast<typename E::Element*>(words);
  if constexpr (std::is_same_v<typename E::Element, float>) {
    for (int64_t c = 0; c < n; ++c) out[c] = x[c];
  } else if constexpr (std::is_same_v<typename E::Element, uint16_t>) {
    const auto* i = reinterpret_cast<const uint32_t*>(x);
    for (int64_t c = 0; c < n; ++c) out[c] = static_cast<uint16_t>(i[c] >> 16);
  } else {
    for (int64_t c = 0; c < n; ++c) out[c] = static_cast<uint8_t>(static_cast<int32_t>(x[c]) + bias);
  }
}

// Word rows of B from kPerWord rows of floats.
template <class E>
inline void interleave_rows(const float* rows, int64_t stride, int64_t columns, Word* out) {
  if constexpr (E::kPerWord == 1) {
    for (int64_t c = 0; c < columns; ++c) std::memcpy(out + c, rows + c, 4);
  } else if constexpr (E::kPerWord == 2) {
    const auto* i = reinterpret_cast<const uint32_t*>(rows);
    for (int64_t c = 0; c < columns; ++c) out[c] = i[c] >> 16 | (i[c + stride] & 0xffff0000u);
  } else {
    const auto byte = [&](int64_t r, int64_t c) {
      return static_cast<uint32_t>(static_cast<int32_t>(rows[r * stride + c])) & 0xffu;
    };
    for (int64_t c = 0; c < columns; ++c) out[c] = byte(0, c) | byte(1, c) << 8 | byte(2, c) << 16 | byte(3, c) << 24;
  }
}

}  // namespace octet::cpu::OCTET_ISA
