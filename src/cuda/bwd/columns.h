// A thread of the preprocessing reads eight channels of the caller's tokens, and the residuals of o.
#pragma once
#include <type_traits>

#include "cuda/bwd/preprocess.h"
#include "cuda/fragment/o_residual.h"
#include "cuda/operands/vec8.h"
#include "cuda/ptx/cp_async.h"

namespace octet::cuda {

// Reads eight channels of one token, then of later ones. Channels and tokens beyond the tensor are zeros.
template <class In>
struct Column {
  using Word = typename Words<In>::Word;
  const In* at;
  int64_t step;
  bool there;
  __device__ Column(const Strided& x, const Index4& first)
      : at(static_cast<const In*>(x.data) + first.offset(x)),
        step(x.stride[2]),
        there(x.data && first.channel < x.shape[3]) {}
  __device__ RawVec8<In> read(bool present) const {
    RawVec8<In> raw;
    if (present && there) raw.word = *reinterpret_cast<const Word*>(at);
    return raw;
  }
  // Starts a copy to shared memory; zeros where the token or the channels do not exist.
  __device__ void copy(Word& to, bool present) const {
    const int bytes = present && there ? sizeof(Word) : 0;
    if constexpr (sizeof(Word) == 16)
      ptx::cp_async(ptx::shared_address(&to), at, bytes);
    else
      ptx::cp_async_8(ptx::shared_address(&to), at, bytes);
  }
  __device__ void advance(int tokens) { at += tokens * step; }
};
template <>
struct Column<void> {
  const Strided& x;
  Index4 index;
  __device__ Column(const Strided& x, const Index4& first) : x(x), index(first) {}
  __device__ RawVec8<void> read(bool present) const {
    RawVec8<void> raw;
    if (present && x.data && index.channel < x.shape[3]) raw.load(x, index);
    return raw;
  }
  __device__ void advance(int tokens) { index.token += tokens; }
};

__device__ inline void clear(Vec8& x) {
  for (float& y : x) y = 0.f;
}

// The type by which the residual of o is read, where o is read as In.
template <class In>
using Residual = std::conditional_t<std::is_void_v<In>, void, S8>;

// Adds its residual to o.
template <class In>
__device__ void add_residual(const PreprocessParams& p, const RawVec8<Residual<In>>& residual, Vec8& o) {
  if constexpr (std::is_void_v<In>) {
    const bool bytes = p.o_residual.element == Element::i8;
    const int shift = residual_shift(p.o.element);
    for (int c = 0; c < kVec8; ++c) {
      const float x = residual.numbers[c];
      o[c] = bytes ? with_residual(o[c], static_cast<int>(x), shift) : o[c] + x;
    }
  } else {
    for (int c = 0; c < kVec8; ++c) o[c] = with_residual(o[c], residual.elements[c], kResidualShift<In>);
  }
}

}  // namespace octet::cuda
