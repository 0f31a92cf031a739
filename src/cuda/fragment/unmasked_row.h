// Recomputes a row of o from only the keys that it sees, in one warp that reads global memory. Kernels need this where
// a tile that a mask cuts holds a non-finite v beyond the mask: 0 inf is NaN and spoils every row that meets the tile.
// They detect that in their epilogue and write those rows again; finite data never takes this path.
#pragma once
#include "cuda/fragment/finish.h"
#include "cuda/fragment/mask.h"
#include "cuda/fragment/o_residual.h"
#include "cuda/fragment/output.h"
#include "cuda/ptx/types.h"
#include "cuda/ptx/warpgroup.h"

namespace octet::cuda {

// Returns x, which is the same in all lanes of a warp, in a form that the compiler knows to be uniform: loops over it
// leave ptxas its uniform registers.
__device__ inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// Rows of a fragment that belong to one warp.
constexpr int kWarpRows = 16;

// Returns the lane. opaque() stops the compiler from keeping values that depend on it in registers throughout the
// kernel.
__device__ inline int cold_lane() { return ptx::opaque(static_cast<int>(threadIdx.x % 32)); }

// Returns true if any of eight packed 16-bit numbers is inf or NaN: their sum, times 0, is then not 0.
template <class T>
__device__ bool has_infinite(const uint4& words) {
  using Pair = std::conditional_t<std::is_same_v<T, F16>, __half2, __nv_bfloat162>;
  const auto* const pairs = reinterpret_cast<const Pair*>(&words);
  Pair sum{T(0.f), T(0.f)};
#pragma unroll
  for (int i = 0; i < 4; ++i) sum = __hfma2(pairs[i], Pair{T(0.f), T(0.f)}, sum);
  return (reinterpret_cast<const uint32_t&>(sum) & 0x7fff7fffu) != 0;
}

// The same for the first of this thread's two rows of a fragment, in the first `Some` columns.
template <int Some, int Columns>
__device__ bool has_infinite(const Accumulator<Columns>& x) {
  float sum[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < Some / 8; ++i)
#pragma unroll
    for (int c = 0; c < 2; ++c) sum[c] = __fmaf_rn(x.x[4 * i + c], 0.f, sum[c]);
  return sum[0] + sum[1] != 0.f;
}

// Returns the dot product of `n` numbers, a multiple of 8, in rows of aligned groups of 8.
template <class T>
__device__ float dot(const T* a, const T* b, int n) {
  struct alignas(8 * sizeof(T)) Eight {
    T x[8];
  };
  float sum = 0.f;
#pragma unroll 1
  for (int i = 0; i < n; i += 8) {
    const Eight x = *reinterpret_cast<const Eight*>(a + i), y = *reinterpret_cast<const Eight*>(b + i);
#pragma unroll
    for (int c = 0; c < 8; ++c) sum = fmaf(float(x.x[c]), float(y.x[c]), sum);
  }
  return sum;
}

// A row's mean value in this thread's channels, every 32nd from its lane on, and log2 of the sum of P.
template <int Columns>
struct UnmaskedRow {
  static constexpr int kChannels = (Columns + 31) / 32;
  float o[kChannels];
  float log2_sum;

  // o = (o scale + mean) share. `factors(channel)` returns scale and mean; the mean is 0 where no key is seen.
  template <class Factors>
  __device__ void scale(float share, const Factors& factors) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      const int channel = cold_lane() + 32 * i;
      if (Columns % 32 != 0 && channel >= Columns) continue;
      const float2 of_channel = factors(channel);
      o[i] = fmaf(o[i], of_channel.x, log2_sum == -INFINITY ? 0.f : of_channel.y) * share;
    }
  }
};

// `logit(key)` returns a logit in base 2; `value(key, channel)` returns v for channels below `columns`.
template <int Columns, class Logit, class Value>
__device__ UnmaskedRow<Columns> attend_row(const Interval& keys, int columns, const Logit& logit, const Value& value) {
  constexpr int kChannels = UnmaskedRow<Columns>::kChannels;
  const int lane = cold_lane();
  UnmaskedRow<Columns> row{};
  float m = -INFINITY, l = 0.f;
#pragma unroll 1
  for (int first = uniform(keys.first), last = uniform(keys.last); first < last; first += 32) {
    const float logit_of_lane = logit(min(first + lane, last - 1));
    const float x = first + lane < last ? logit_of_lane : -INFINITY;
    float most = fmaxf(m, x);
#pragma unroll 1
    for (int offset = 16; offset; offset /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
    const float from = most == -INFINITY ? 0.f : most;  // -inf: no key has had a P above 0 yet
    const float rescale = ptx::exp2(m - from), p = ptx::exp2(x - from);
    float sum = p;
#pragma unroll 1
    for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    l = l * rescale + sum, m = most;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) row.o[c] *= rescale;
    const int count = min(32, last - first);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const float weight = __shfl_sync(~0u, p, i);
#pragma unroll
      for (int c = 0; c < kChannels; ++c)
        if (lane + 32 * c < columns) row.o[c] = fmaf(weight, value(first + i, lane + 32 * c), row.o[c]);
    }
    bool lost = true;  // true: further keys cannot change the row
#pragma unroll
    for (int c = 0; c < kChannels; ++c) lost &= isnan(row.o[c]) || lane + 32 * c >= columns;
    if (__all_sync(~0u, lost)) break;
  }
  const float inverse = l == 0.f ? 0.f : 1.f / l;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) row.o[c] *= inverse;
  row.log2_sum = l == 0.f ? -INFINITY : m + log2f(l);
  return row;
}

// Returns true if v is inf or NaN for keys of `tiles` that some of the warp's rows from `first` on, before `end`, does
// not see. `keys_of(row)` returns the keys that a row sees. Results that are not finite for another reason come from
// keys that all rows see, and stay.
template <class KeysOf, class Value>
__device__ bool masks_infinite(const Interval& tiles, int first, int end, int columns, const KeysOf& keys_of,
                               const Value& value) {
  const Interval seen_by_all{keys_of(min(first + kWarpRows, end) - 1).first, keys_of(first).last};
  float sum = 0.f;
#pragma unroll 1
  for (int key = uniform(tiles.first), last = uniform(tiles.last); key < last; ++key)
    if (key < seen_by_all.first || key >= seen_by_all.last)
#pragma unroll 1
      for (int c = cold_lane(); c < columns; c += 32) sum = fmaf(value(key, c), 0.f, sum);
  return __any_sync(~0u, sum != 0.f);
}

// Loads and stores of single elements of an output of any type.
__device__ inline float number_at(const Output& t, int64_t i) {
  return with_output_type<true>(t.element, [&](auto* type) { return float(static_cast<decltype(type)>(t.data)[i]); });
}
__device__ inline void set_number(const Output& t, int64_t i, float x) {
  with_output_type<true>(t.element, [&](auto* type) {
    static_cast<decltype(type)>(t.data)[i] = std::remove_pointer_t<decltype(type)>(x);
  });
}

// Stores what x lost when it was rounded to `rounded` in o's type.
__device__ inline void set_residual(const Output& t, int64_t i, float x, float rounded, Element o) {
  if (t.element == Element::i8)
    static_cast<S8*>(t.data)[i] = static_cast<S8>(min(127, residual_of(x, rounded, residual_shift(o))));
  else
    set_number(t, i, x - rounded);
}

// Queries [first, tokens) of a sequence of (batch, head) that starts at token `start`, of which a warp has up to
// kWarpRows.
struct WarpQueries {
  int batch, head, start, first, tokens;
  __device__ int64_t offset(const Output& t, int query) const { return t.offset(batch, head, start + query); }
};

// Calls f(query, lane) for those rows of a warp that are not finite, after all lanes have stored them.
// `finite(query, c)` tells whether their numbers in channel c are.
template <class Finite, class F>
__device__ void for_nonfinite_rows(const WarpQueries& rows, int columns, const Finite& finite, const F& f) {
  const int lane = cold_lane(), last = uniform(min(rows.first + kWarpRows, rows.tokens));
  __syncwarp();
#pragma unroll 1
  for (int query = uniform(rows.first); query < last; ++query) {
    bool all = true;
#pragma unroll 1
    for (int c = lane; c < columns; c += 32) all &= finite(query, c);
    if (__all_sync(~0u, all)) continue;
    f(query, lane);
  }
}

// Writes those rows of o again. `row_of(query)` returns a row of o in this thread's channels.
template <int Columns, class RowOf>
__device__ void rewrite_rows(const Output& o, const Output& residual, const WarpQueries& rows, int columns,
                             const RowOf& row_of) {
  const auto finite = [&](int query, int c) {
    return static_cast<bool>(isfinite(number_at(o, rows.offset(o, query) + c)));
  };
  const auto rewrite = [&](int query, int lane) {
    const UnmaskedRow<Columns> row = row_of(query);
#pragma unroll
    for (int i = 0; i < UnmaskedRow<Columns>::kChannels; ++i) {
      const int c = lane + 32 * i;
      if (c >= columns) continue;
      set_number(o, rows.offset(o, query) + c, row.o[i]);
      if (residual.data)
        set_residual(residual, rows.offset(residual, query) + c, row.o[i], number_at(o, rows.offset(o, query) + c),
                     o.element);
    }
  };
  for_nonfinite_rows(rows, columns, finite, rewrite);
}

}  // namespace octet::cuda
