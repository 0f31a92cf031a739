// Recomputes rows of o and to from only the keys that they see, as fragment/unmasked_row.h does for o alone.
#pragma once
#include "cuda/fragment/finish_jvp.h"
#include "cuda/fragment/unmasked_row.h"

namespace octet::cuda {

// Writes those rows of a warp again that are not finite in `columns` columns of o and to from `first_column` on.
//   keys_of(query)            the keys that a query sees
//   logit(query, key)         its logit and the tangent of that
//   keeps(query, key)         false where dropout drops the element of P
//   value(key, channel)       a number of v, as float2 with that of tv
//   finish(query, m, l, r)    the FinishedRow of sums over the logit m whose tangents lack nothing
template <int Columns, class KeysOf, class Logit, class Keeps, class Value, class Finish>
__device__ void rewrite_jvp_rows(const Output& to_o, const Output& to_u, const WarpQueries& rows, int first_column,
                                 int columns, const KeysOf& keys_of, const Logit& logit, const Keeps& keeps,
                                 const Value& value, const Finish& finish) {
  constexpr int kChannels = (Columns + 31) / 32;
  const auto number = [&](const Output& t, int query, int c) {
    return number_at(t, rows.offset(t, query) + first_column + c);
  };
  const auto finite = [&](int query, int c) {
    return isfinite(number(to_o, query, c)) && isfinite(number(to_u, query, c));
  };
  for_nonfinite_rows(rows, columns, finite, [&](int query, int lane) {
    const Interval keys = keys_of(query);
    float o[kChannels]{}, u[kChannels]{}, m = -INFINITY, l = 0.f, r = 0.f;
#pragma unroll 1
    for (int start = keys.first; start < keys.last; start += 32) {
      const float2 of_lane = logit(query, min(start + lane, keys.last - 1));
      const float x = start + lane < keys.last ? of_lane.x : -INFINITY;
      float most = fmaxf(m, x);
      for (int offset = 16; offset; offset /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
      const float from = most == -INFINITY ? 0.f : most, rescale = expf(m - from), p = expf(x - from);
      const float h = p == 0.f ? 0.f : p * of_lane.y;
      float sum = p, sum_h = h;
      for (int offset = 16; offset; offset /= 2)
        sum += __shfl_xor_sync(~0u, sum, offset), sum_h += __shfl_xor_sync(~0u, sum_h, offset);
      l = l * rescale + sum, r = r * rescale + sum_h, m = most;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) o[c] *= rescale, u[c] *= rescale;
#pragma unroll 1
      for (int i = 0; i < min(32, keys.last - start); ++i) {
        const float of_p = __shfl_sync(~0u, p, i), of_h = __shfl_sync(~0u, h, i);
        if (of_p == 0.f || !keeps(query, start + i)) continue;  // what hides a key leaves it a p of 0
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          if (lane + 32 * c >= columns) continue;
          const float2 numbers = value(start + i, first_column + lane + 32 * c);
          o[c] = fmaf(of_p, numbers.x, o[c]);
          u[c] = fmaf(of_p, numbers.y, fmaf(of_h, numbers.x, u[c]));
        }
      }
    }
    const FinishedRow f = finish(query, m, l, r);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      if (lane + 32 * c >= columns) continue;
      f.apply(o[c], u[c]);
      const int channel = first_column + lane + 32 * c;
      set_number(to_o, rows.offset(to_o, query) + channel, o[c]);
      set_number(to_u, rows.offset(to_u, query) + channel, u[c]);
    }
  });
}

}  // namespace octet::cuda
