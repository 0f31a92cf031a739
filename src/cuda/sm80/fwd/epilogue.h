// The epilogue of the forward pass: o = o / l, its residual, lse, and the recomputation of rows that an inf or NaN has
// reached from behind a mask or from a dropped element.
#pragma once
#include "cuda/fragment/finish.h"
#include "cuda/fragment/o_residual.h"
#include "cuda/sm80/fwd/forward.h"

namespace octet::cuda::sm80 {

// Those of warps that share channels lie where each of them writes its own ones.
template <class Kind>
__device__ inline uint32_t* Forward<Kind>::saved(int row) const {
  const int64_t at = (shared.q_tile.batch * a.o.stride[0] + shared.q_tile.head * a.o.stride[1] +
                      (int64_t{shared.q_tile.q_first} + row) * a.o.stride[2] + first_channel()) *
                     (a.o.element == Element::f32 ? 4 : 2);
  return reinterpret_cast<uint32_t*>(static_cast<unsigned char*>(a.o.data) + at) + threadIdx.x % 4;
}

template <class Kind>
__device__ inline void Forward<Kind>::flip(const Softmax (&softmax)[kRowBlocks], O& o) const {
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block)
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int query = thread_row(block) + 8 * row;
      if (query >= shared.q_tile.q_tokens) continue;
      if (threadIdx.x % 4 == 0) shared.m_at_flip[query - shared.q_tile.q_start] = softmax[block].m[row];
      uint32_t* const words = saved(query);
#pragma unroll
      for (int i = 0; i < kChannelsV / 8; ++i) {
        if (first_channel() + 8 * i >= a.dim_v) continue;
        float* const x = &o[block].x[4 * i + 2 * row];
        const uint32_t word = __byte_perm(__float_as_uint(x[0]), __float_as_uint(x[1]), 0x7632);
        const float2 close = two_upper_halves(word);
        x[0] = __fmaf_rn(close.x, -2.f, x[0]), x[1] = __fmaf_rn(close.y, -2.f, x[1]);
        words[4 * i] = word;
      }
    }
}

// Adds 2 a, rescaled as o was since the flip.
template <class Kind>
__device__ inline void Forward<Kind>::unflip(const Softmax (&softmax)[kRowBlocks], O& o) const {
  __syncwarp();
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block)
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int query = thread_row(block) + 8 * row;
      if (query >= shared.q_tile.q_tokens) continue;
      const float former = shared.m_at_flip[query - shared.q_tile.q_start], now = softmax[block].m[row];
      if (former == -INFINITY) continue;  // o was 0
      const float twice = 2.f * ptx::exp2(softmax[block].template origin<kExponent>(row, former) -
                                          softmax[block].template origin<kExponent>(row, now));
      const uint32_t* const words = saved(query);
#pragma unroll
      for (int i = 0; i < kChannelsV / 8; ++i) {
        if (first_channel() + 8 * i >= a.dim_v) continue;
        const float2 close = two_upper_halves(words[4 * i]);
        float* const x = &o[block].x[4 * i + 2 * row];
        x[0] = __fmaf_rn(close.x, twice, x[0]), x[1] = __fmaf_rn(close.y, twice, x[1]);
      }
    }
}

// Adds up what the warps found that share rows, over the largest maximum, in the first of them. Returns whether this
// warp is the first of its rows.
template <class Kind>
__device__ inline bool Forward<Kind>::join_key_warps(Softmax (&softmax)[kRowBlocks], O& o) const {
  constexpr int kNumbers = Dims::kDimV / 2, kOfWarp = (kNumbers + 2 * kRowsPerThread + 1) * 32;
  static_assert(kRowBlocks == 1 && sizeof(float) * (Tile::kWarps - 1) * kOfWarp <= sizeof(shared.k) + sizeof(shared.v));
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float* const others = reinterpret_cast<float*>(shared.k) + static_cast<int>(threadIdx.x) % 32;
  __syncthreads();  // all tiles have been read
  if (warp % kKeyWarps > 0) {
    float* const to = others + (warp - warp / kKeyWarps - 1) * kOfWarp;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) to[32 * i] = o[0].x[i];
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      to[32 * (kNumbers + row)] = softmax[0].m[row];
      to[32 * (kNumbers + kRowsPerThread + row)] = softmax[0].l[row];
    }
    to[32 * (kNumbers + 2 * kRowsPerThread)] = Operands::unit_of(softmax[0]);
  }
  __syncthreads();
  if (warp % kKeyWarps > 0) return false;
#pragma unroll 1
  for (int i = 0; i < kKeyWarps - 1; ++i) {
    const float* const from = others + (warp - warp / kKeyWarps + i) * kOfWarp;
    RowValues own, other;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float m = from[32 * (kNumbers + row)], l = from[32 * (kNumbers + kRowsPerThread + row)];
      const float most = fmaxf(softmax[0].m[row], m);
      const float origin = softmax[0].template origin<kExponent>(row, most == -INFINITY ? 0.f : most);
      own[row] = ptx::exp2(softmax[0].template origin<kExponent>(row, softmax[0].m[row]) - origin);
      other[row] = ptx::exp2(softmax[0].template origin<kExponent>(row, m) - origin);
      softmax[0].m[row] = most, softmax[0].l[row] = softmax[0].l[row] * own[row] + l * other[row];
    }
    Operands::join_units(softmax[0], from[32 * (kNumbers + 2 * kRowsPerThread)], own, other);
#pragma unroll
    for (int n = 0; n < kNumbers; ++n)
      o[0].x[n] = __fmaf_rn(o[0].x[n], own[n / 2 % 2], from[32 * n] * other[n / 2 % 2]);
  }
  return true;
}

// Writes o, its residual and lse of this thread's rows or, where keys are split, o and statistics of this split.
template <class Kind>
__device__ inline void Forward<Kind>::write(const Softmax (&softmax)[kRowBlocks], O& o) const {
  const int kv = shared.q_tile.batch * (a.scheduler.heads / a.group) + shared.q_tile.head / a.group;
  const float v_scale = v_scale_of(kv) * Operands::unit_of(softmax[0]);
  // All rows of a warp meet the same v, so that one of them is enough.
  const bool nonfinite = has_infinite<kChannelsV>(o[0]);
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block) {
    const int first = thread_row(block);
    RowValues inverse, share{1.f, 1.f};
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int at = first + 8 * row;
      const bool present = at < rows_end() && threadIdx.x % 4 == 0 && channel_part() == 0;
      const float l = quad_sum(softmax[block].l[row]);
      inverse[row] = Operands::inverse_of(l, v_scale);
      const float origin = Operands::origin(softmax[block], row);
      if constexpr (kPairs)
        if (a.statistics.data && present) *output_row<RowStatistics>(a.statistics, at) = {origin, l, lse_bias_of(at)};
      RowSum<> sum = RowSum<>::of(origin, l, lse_bias_of(at));
      if (a.sinks.data) share[row] = sum.add_sink(a.sinks.at(shared.q_tile.batch, head_of(at)));
      if (a.lse.data && present) *output_row<float>(a.lse, at) = sum.lse();
    }
#pragma unroll
    for (int i = 0; i < kChannelsV / 8; ++i) {
      const int channel = first_channel() + 8 * i + fragment_column();
      const float2 mean = Operands::v_mean(*this, kv, channel), by = Operands::v_factor(*this, channel);
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) {
        float* const x = &o[block].x[4 * i + 2 * row];
        const bool none = inverse[row] == 0.f;
        x[0] = none ? 0.f : __fmaf_rn(x[0], inverse[row] * by.x, mean.x) * share[row];
        x[1] = none ? 0.f : __fmaf_rn(x[1], inverse[row] * by.y, mean.y) * share[row];
      }
    }
    with_output_type(a.o.element,
                     [&](auto* type) { write_as<std::remove_pointer_t<decltype(type)>>(first, o[block]); });
  }
  if constexpr (Operands::kRecomputes)
    if ((a.mask.windowed || hides_keys()) && __any_sync(~0u, nonfinite))
#pragma unroll 1
      for (int block = 0; block < kRowBlocks; ++block) recompute_rows(ptx::opaque(block));
}

template <class Kind>
template <class T>
__device__ inline void Forward<Kind>::write_as(int row, OTile& o) const {
  const auto present = [&](int i) { return row + 8 * i < rows_end(); };
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i)
    store_row(output_row<T>(a.o, row + 8 * i) + first_channel(), present(i), o, i, a.dim_v - first_channel());
  store_residuals<T, false>(
      a.o_residual, o, a.dim_v - first_channel(),
      [&](int i) { return output_offset(a.o_residual, row + 8 * i) + first_channel(); }, present);
}

// Recomputes those rows of a row block of this warp that are not finite from the keys that they see.
template <class Kind>
__device__ inline void Forward<Kind>::recompute_rows(int block) const {
  const int kv_head = shared.q_tile.head / a.group, kv = shared.q_tile.batch * (a.scheduler.heads / a.group) + kv_head;
  const int first = warp_row() + block * kWarpRows;
  const auto value = [&](int key, int channel) {
    return Operands::value(*this, shared.v_start + key_offset(a.v, key), key, first_channel() + channel);
  };
  const int columns = a.dim_v - first_channel();
  const bool masked = !kPlain && a.terms.mask;
  if (!hides_keys()) {
    const SeenTiles tiles = kPairs ? shared.tiles : tiles_of(shared.q_tile.q_start, kRows);
    const Interval keys{tiles.first * kKeys, min(tiles.last * kKeys, shared.q_tile.k_tokens)};
    const auto range_of = [&](int row) { return this->range_of(row); };
    if (!masks_infinite(keys, first, rows_end(), columns, range_of, value)) return;
  }
  const auto recompute = [&](int row) {
    const int head = head_of(row);
    const auto* const q = a.q.row<QkType>(shared.q_tile.batch, head, int64_t{shared.q_tile.q_first} + query_of(row));
    const RowTerms terms = !kPlain ? terms_of(row) : RowTerms{};
    const auto logit = [&](int key) {
      const float product = Operands::product(*this, q, shared.k_start + key_offset(a.k, key), row, key);
      if constexpr (!kPlain) return logit_of(a.terms, terms, key, product) * a.scale_log2e;
      return product * a.scale_log2e;
    };
    const auto seen_value = [&](int key, int channel) {
      if (kDrops && a.dropout.drops(shared.q_tile.sequence, head, query_of(row), key)) return 0.f;
      if (masked &&
          mask_number(a.terms.element, a.terms.mask, terms.mask_start + key * a.terms.mask_stride[3]) == -INFINITY)
        return 0.f;
      return value(key, channel);
    };
    UnmaskedRow<kChannelsV> result = attend_row<kChannelsV>(split_of(range_of(row)), columns, logit, seen_value);
    RowSum<> sum{result.log2_sum, terms.row_bias + Operands::mean_logit(*this, row)};
    result.scale(sum.add_sink(a.sinks.at(shared.q_tile.batch, head)), [&](int channel) -> float2 {
      const int even = first_channel() + (channel & ~1);
      const float2 mean = Operands::v_mean(*this, kv, even), by = Operands::v_factor(*this, even);
      return {v_scale_of(kv) * (channel & 1 ? by.y : by.x), channel & 1 ? mean.y : mean.x};
    });
    return result;
  };
  const auto &o = channels_of(a.o), &o_residual = channels_of(a.o_residual);
  if constexpr (kPairs) {
#pragma unroll 1
    for (int row = uniform(first), last = uniform(min(first + kWarpRows, rows_end())); row < last; ++row)
      rewrite_rows<kChannelsV>(o, o_residual,
                               {output_batch(), head_of(row), shared.q_tile.q_first, query_of(row), query_of(row) + 1},
                               columns, [&](int) { return recompute(row); });
  } else {
    const TileInfo& tile = shared.q_tile;
    rewrite_rows<kChannelsV>(o, o_residual, {tile.batch, tile.head, tile.q_first, first, tile.q_tokens}, columns,
                             recompute);
  }
}

}  // namespace octet::cuda::sm80
