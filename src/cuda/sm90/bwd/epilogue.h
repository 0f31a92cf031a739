// The epilogue of the backward kernels: dk and dv of a block of keys in the caller's type.
#pragma once
#include <cstring>

#include "cuda/bwd/schedule.h"
#include "cuda/fragment/output.h"
#include "cuda/ptx/warpgroup.h"

namespace octet::cuda::sm90 {

template <class Type, int Columns>
__device__ void write_keys_as(const Output& out, const KeyBlockInfo& w, int key, int channel,
                              const Accumulator<Columns>& x, int columns) {
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    const int j = key + fragment_row() + 8 * row;
    store_row<Type, CachePolicy::evict_first>(
        out.row<Type>(w.batch, w.kv_head, static_cast<int64_t>(w.k.first) + j) + channel, j < w.k.tokens, x, row,
        columns - channel);
  }
}

template <class Type, int Columns>
__device__ void add_keys_as(const Output& out, const KeyBlockInfo& w, int first_key, int channel,
                            Accumulator<Columns>& x, int columns) {
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    const int key = first_key + fragment_row() + 8 * row;
    const Type* const from = out.row<Type>(w.batch, w.kv_head, static_cast<int64_t>(w.k.first) + key) + channel;
    if (key >= w.k.tokens) continue;
#pragma unroll
    for (int i = 0; i < Columns / 8; ++i) {
      if (8 * i >= columns - channel) continue;
      struct alignas(2 * sizeof(Type)) {
        Type numbers[2];
      } pair;
      memcpy(&pair, from + 8 * i + fragment_column(), sizeof pair);
      x.x[4 * i + 2 * row] += float(pair.numbers[0]), x.x[4 * i + 2 * row + 1] += float(pair.numbers[1]);
    }
  }
}

template <int Columns>
__device__ void add_keys(const Output& out, const KeyBlockInfo& w, int key, int channel, Accumulator<Columns>& x,
                         int columns) {
  with_output_type(out.element, [&](auto* type) {
    add_keys_as<std::remove_pointer_t<decltype(type)>>(out, w, key, channel, x, columns);
  });
}

// Multiplies by scale 2^exponent. 2^exponent may not be a float, so it is applied as two factors.
template <int Columns>
__device__ void scale_keys(Accumulator<Columns>& x, float scale, int exponent) {
  const float first = scale * exp2f(static_cast<float>(exponent / 2)),
              second = exp2f(static_cast<float>(exponent - exponent / 2));
#pragma unroll
  for (int i = 0; i < Columns / 2; ++i) x.x[i] = x.x[i] * first * second;
}

// Writes x to the rows from `key` on and the columns from `channel` on; further bins of the queries add to what the
// bins before have written.
template <Bins bins, int Columns>
__device__ void write_keys(const Output& out, const KeyBlockInfo& w, int key, int channel, Accumulator<Columns>& x,
                           int columns) {
  if constexpr (bins == Bins::further) add_keys(out, w, key, channel, x, columns);
  with_output_type(out.element, [&](auto* type) {
    write_keys_as<std::remove_pointer_t<decltype(type)>>(out, w, key, channel, x, columns);
  });
}

}  // namespace octet::cuda::sm90
