// The residual of o in one byte, as kernels write and read it. core/o_residual.h defines it.
#pragma once
#include <cstdint>

#include "cuda/fragment/output.h"

namespace octet::cuda {

// log2 of the residual's unit in steps of f32, of an o in T.
template <class T>
constexpr int kResidualShift = std::is_same_v<T, Bf16>  ? 8
                               : std::is_same_v<T, F16> ? 5
                                                        : 12;
__device__ inline int residual_shift(Element o) {
  return o == Element::bf16 ? kResidualShift<Bf16> : o == Element::f16 ? kResidualShift<F16> : kResidualShift<E4m3>;
}

// Returns the residual of x, which was rounded to `rounded`; more than 127 is to be saturated.
__device__ inline int residual_of(float x, float rounded, int shift) {
  const int steps = static_cast<int>(__float_as_uint(x) - __float_as_uint(rounded));
  return max(steps + (1 << (shift - 1)), -127 * (1 << shift)) >> shift;
}
__device__ inline float with_residual(float rounded, int residual, int shift) {
  const float x = __uint_as_float(__float_as_uint(rounded) + (static_cast<uint32_t>(residual) << shift));
  return isfinite(rounded) ? x : rounded;
}

// Returns a pair of numbers rounded to T. `kPacked`: the compiler is to find the words in registers where o was packed;
// else each number is rounded by itself, as such words would take too many registers.
template <class T, bool kPacked>
__device__ inline float2 rounded(float x0, float x1) {
  if constexpr (kPacked && sizeof(T) == 2)
    return ptx::unpack<T>(ptx::pack<T>(x0, x1));
  else
    return {float(T(x0)), float(T(x1))};
}

// Returns the residuals of four numbers of an o in T, x0's in the lowest byte.
template <class T, bool kPacked = false>
__device__ inline uint32_t residuals(float x0, float x1, float x2, float x3) {
  const float2 low = rounded<T, kPacked>(x0, x1), high = rounded<T, kPacked>(x2, x3);
  constexpr int kShift = kResidualShift<T>;
  return ptx::pack_s8(residual_of(x0, low.x, kShift), residual_of(x1, low.y, kShift), residual_of(x2, high.x, kShift),
                      residual_of(x3, high.y, kShift));
}

// Stores what this thread's two rows of x, up to `columns` columns, lose as an o in T: in bytes or in T, if `to` is
// there. `offset(which)` returns where a row is in `to`, `present(which)` whether it exists. x becomes undefined. All
// threads of the warp call it together.
template <class T, bool kPacked, int Columns, class Offset, class Present>
__device__ void store_residuals(const Output& to, Accumulator<Columns>& x, int columns, const Offset& offset,
                                const Present& present) {
  if (!to.data) return;
  if constexpr (sizeof(T) < 4) {
    if (to.element == Element::i8) {
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row)
        store_bytes<CachePolicy::normal, Columns>(
            static_cast<S8*>(to.data) + offset(row), present(row), columns, [&](int low, int high) {
              const float *a = &x.x[4 * low + 2 * row], *b = &x.x[4 * high + 2 * row];
              return residuals<T, kPacked>(a[0], a[1], b[0], b[1]);
            });
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < Columns / 2; i += 2) {
    const float2 o = rounded<T, kPacked>(x.x[i], x.x[i + 1]);
    x.x[i] -= o.x, x.x[i + 1] -= o.y;
  }
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row)
    store_row(static_cast<T*>(to.data) + offset(row), present(row), x, row, columns);
}

}  // namespace octet::cuda
