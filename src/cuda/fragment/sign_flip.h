// Sign-flip compensation. Half way through the keys, o becomes o - 2 a, where a is close to o; 2 a is added back at the
// end. Tensor cores truncate sums towards 0, so what they take from o in the second half has the other sign.
#pragma once
#include "cuda/fragment/rows.h"

namespace octet::cuda {

// The 16-byte words in which a thread saves a: the upper 16 bits of each number of o.
template <int Columns>
constexpr int kSavedWords = Columns / 16;

// Unpacks two numbers from their upper halves. The lower half of the second keeps the bits of the first.
__device__ inline float2 two_upper_halves(uint32_t word) {
  return {__uint_as_float(word << 16), __uint_as_float(word)};
}

// Subtracts 2 a, which is exact unless the result grows into the next binade. The words of a thread lie kWarpgroup
// apart.
template <int Columns>
__device__ void flip_signs(Accumulator<Columns>& o, uint4* partial) {
#pragma unroll
  for (int i = 0; i < kSavedWords<Columns>; ++i) {
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float* const x = &o.x[8 * i + 2 * w];
      words[w] = __byte_perm(__float_as_uint(x[0]), __float_as_uint(x[1]), 0x7632);
      const float2 a = two_upper_halves(words[w]);
      x[0] = __fmaf_rn(a.x, -2.f, x[0]), x[1] = __fmaf_rn(a.y, -2.f, x[1]);
    }
    partial[i * kWarpgroup] = {words[0], words[1], words[2], words[3]};
  }
}

// Adds `by` times a: 2 a, rescaled as the sums were since flip_signs.
template <int Columns>
__device__ void unflip_signs(Accumulator<Columns>& o, const uint4* partial, const RowValues& by) {
#pragma unroll
  for (int i = 0; i < kSavedWords<Columns>; ++i) {
    const uint4 word = partial[i * kWarpgroup];
    const uint32_t words[] = {word.x, word.y, word.z, word.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 a = two_upper_halves(words[w]);
      float* const x = &o.x[8 * i + 2 * w];
      x[0] = __fmaf_rn(a.x, by[w % 2], x[0]), x[1] = __fmaf_rn(a.y, by[w % 2], x[1]);
    }
  }
}

}  // namespace octet::cuda
