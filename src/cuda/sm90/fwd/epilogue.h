// The epilogue of the 16-bit forward pass: o = o / l, its residual, lse, and the recomputation of rows that a masked
// inf or NaN has reached.
#pragma once
#include "cuda/fragment/finish.h"
#include "cuda/fragment/o_residual.h"
#include "cuda/sm90/fwd/forward.h"

namespace octet::cuda::sm90 {

// A tile of which ptxas cannot compute the offset of stores ahead of a mainloop that has no register for it.
template <class Tile>
struct WithLateOffset : Tile {};
template <class T, int Columns, class Tile>
__device__ void store(const Operand<T, Columns>& x, const WithLateOffset<Tile>& tile, int row) {
  cuda::store(x, static_cast<const Tile&>(tile), row, store_offset(ptx::opaque(static_cast<int>(threadIdx.x))));
}

// Writes o, its residual and lse of this thread's two rows. Returns true if a number of v that is not finite may have
// met them; all rows of a warp meet the same v, so that one of them is enough.
template <class Precision, class Dims>
__device__ inline bool Forward<Precision, Dims>::write(const TileInfo& q_tile, int query, const OnlineSoftmax& softmax,
                                                       VMean& v_mean, Accumulator<Dims::kDimV>& o, unsigned char* q,
                                                       int warpgroup) const {
  const float v_scale = v_scale_of(q_tile.batch * (a.scheduler.heads / a.group) + q_tile.head / a.group);
  RowValues l, inverse, share{1.f, 1.f};
  RowValues origin;
  RowValues row_bias{0.f, 0.f};  // what the logits of the row lack: of ALiBi, or by the mean of k
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    l[row] = quad_sum(softmax.l[row]);
    origin[row] = softmax.template origin<Precision::kPExponent>(row, softmax.m[row]);
    if constexpr (kQuantizedQk) {
      const Interval seen = a.mask.keys_of(query + 8 * row, q_tile.q_tokens, q_tile.k_tokens);
      if (seen.first == seen.last) l[row] = 0.f;  // whatever the scale is
    }
    inverse[row] = l[row] == 0.f ? 0.f : v_scale / l[row];
  }
  if constexpr (kQuantizedQk)
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row)
      if (a.mean_logit && l[row] != 0.f && query + 8 * row < q_tile.q_tokens)
        row_bias[row] = a.scale * a.mean_logit[a.scheduler.row_of(q_tile) + query + 8 * row];
  if constexpr (kAlibi) {
    const float slope = a.slopes.at(q_tile.sequence, q_tile.head);
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row)
      row_bias[row] = alibi_row(q_tile, slope, query + 8 * row).row_bias(slope);
  }
  if constexpr (kMasked) {
    const float* const from = row_bias_of(warpgroup, ptx::opaque(static_cast<int>(threadIdx.x)));
    row_bias = {from[0], from[8]};
  }
  if (a.sinks.data) {
    const float sink = a.sinks.at(q_tile.batch, q_tile.head);
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      auto sum = RowSum<kBiased>::of(origin[row], l[row], row_bias[row]);
      share[row] = sum.add_sink(sink), origin[row] = sum.log2, l[row] = 1.f, row_bias[row] = sum.row_bias;
    }
  }
  write_lse(q_tile, query, origin, l, row_bias);
  if constexpr (!kVMeanEarly) v_mean = v_mean_of(q_tile);
#pragma unroll
  for (int i = 0; i < Dims::kDimV / 2; ++i) {
    if constexpr (kCompensated<Precision>)
      o.x[i] = __fmaf_rn(o.x[i], inverse[i / 2 % 2], i % 2 ? v_mean.x[i / 4].y : v_mean.x[i / 4].x);
    else
      o.x[i] *= inverse[i / 2 % 2];
  }
  if constexpr (kCompensated<Precision>)
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row)
      if (inverse[row] == 0.f)
#pragma unroll
        for (int i = 0; i < Dims::kDimV / 8; ++i) o.x[4 * i + 2 * row] = o.x[4 * i + 2 * row + 1] = 0.f;
  if (a.sinks.data) scale_rows(o, share);
  return with_output_type<kQuantizedQk>(a.o.element, [&](auto* type) {
    return write_as<std::remove_pointer_t<decltype(type)>>(q_tile, query, o, q, warpgroup);
  });
}

// Writes lse. Four threads share two rows; two of them write one row each, as a logarithm takes 25 instructions.
template <class Precision, class Dims>
__device__ inline void Forward<Precision, Dims>::write_lse(const TileInfo& q_tile, int query, const RowValues& origin,
                                                           const RowValues& l, const RowValues& row_bias) const {
  const int row = threadIdx.x % 2, i = query + 8 * row;
  if (!a.lse.data || i >= q_tile.q_tokens || threadIdx.x % 4 >= kRowsPerThread) return;
  const auto of_row = [&](const RowValues& x) { return row ? x[1] : x[0]; };
  *a.lse.row<float>(q_tile.batch, q_tile.head, static_cast<int64_t>(q_tile.q_first) + i) =
      RowSum<kBiased>::of(of_row(origin), of_row(l), of_row(row_bias)).lse();
}

template <class Precision, class Dims>
template <class T>
__device__ inline bool Forward<Precision, Dims>::write_as(const TileInfo& q_tile, int query,
                                                          Accumulator<Dims::kDimV>& o, unsigned char* q,
                                                          int warpgroup) const {
  constexpr bool kThroughShared = kThroughQ && sizeof(T) == 2;
  if (kThroughShared) ptx::barrier_sync(kVoteBarrier + warpgroup, kWarpgroup);  // the warpgroup has read q
  const bool nonfinite = write_to<T>(a.o, q_tile, query, o, q, warpgroup);
  const auto offset = [&](int row) {
    return a.o_residual.offset(q_tile.batch, q_tile.head, static_cast<int64_t>(q_tile.q_first) + query + 8 * row);
  };
  store_residuals<T, kThroughShared>(a.o_residual, o, a.dim_v, offset,
                                     [&](int row) { return query + 8 * row < q_tile.q_tokens; });
  return nonfinite;
}

template <class Precision, class Dims>
template <class T>
__device__ inline bool Forward<Precision, Dims>::write_to(const Output& to, const TileInfo& q_tile, int query,
                                                          const Accumulator<Dims::kDimV>& o, unsigned char* q,
                                                          int warpgroup) const {
  if constexpr (kThroughQ && sizeof(T) == 2) {
    using Rows = SharedTile<T, kRows, Dims::kDimV>;
    const std::conditional_t<kMasked, WithLateOffset<Rows>, Rows> tile{q + warpgroup * kWarpgroupRows * kPanelRowBytes};
    const int first = query - fragment_row();
    T* const rows = to.row<T>(q_tile.batch, q_tile.head, static_cast<int64_t>(q_tile.q_first) + first);
    const uint4 word = store_rows(rows, to.stride[2], q_tile.q_tokens - first, o, tile, a.dim_v);
    return has_infinite<T>(word);
  } else {
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int i = query + 8 * row;
      store_row(to.row<T>(q_tile.batch, q_tile.head, static_cast<int64_t>(q_tile.q_first) + i), i < q_tile.q_tokens, o,
                row, a.dim_v);
    }
    return has_infinite<Dims::kDimV>(o);
  }
}

// Recomputes the rows of this warp that are not finite from the keys that they see.
template <class Precision, class Dims>
__device__ inline void Forward<Precision, Dims>::recompute_rows(const TileInfo& q_tile, int warpgroup) const {
  using QkType = typename Precision::QkType;
  const int kv_head = q_tile.head / a.group, kv = q_tile.batch * (a.scheduler.heads / a.group) + kv_head;
  const int k_first = first_key_of(q_tile), warp = static_cast<int>(threadIdx.x % kWarpgroup / 32);
  const int first = q_tile.q_start + warpgroup * kWarpgroupRows + warp * kWarpRows;
  const auto keys_of = [&](int query) { return a.mask.keys_of(query, q_tile.q_tokens, q_tile.k_tokens); };
  const auto value = [&](int key, int channel) {
    return float(
        a.v_rows.row<typename Precision::PType>(q_tile.batch, kv_head, int64_t{q_tile.k_first} + key)[channel]);
  };
  const SeenTiles tiles = seen_tiles(a.mask, q_tile, q_tile.q_start, kRows, kKeys);
  const Interval keys{tiles.first * kKeys, min(tiles.last * kKeys, q_tile.k_tokens)};
  if (!kDrops && !kMasked && !masks_infinite(keys, first, q_tile.q_tokens, a.dim_v, keys_of, value)) return;
  const auto row_of = [&](int query) {
    const auto* const q = a.q_rows.row<QkType>(q_tile.batch, q_tile.head, int64_t{q_tile.q_first} + query);
    const float scale_log2 = softmax_scale_log2(q_tile, query)[0];
    const float slope = kAlibi ? a.slopes.at(q_tile.sequence, q_tile.head) : 0.f;
    const float mask_bias = kMasked ? a.mask_rows.bias(q_tile.batch, q_tile.head, query) : 0.f;
    const AlibiRow alibi = kAlibi ? alibi_row(q_tile, slope, query) : AlibiRow{};
    const auto logit = [&](int key) {
      const float k_scale = kQuantizedQk ? a.k_scale[static_cast<int64_t>(kv) * a.keys + k_first + key] : 1.f;
      const float x =
          scale_log2 * k_scale * dot(q, a.k_rows.row<QkType>(q_tile.batch, kv_head, int64_t{k_first} + key), a.dim);
      if constexpr (kMasked) {
        const float number = a.mask_rows.number(q_tile.batch, q_tile.head, query, key);
        return number == -INFINITY ? number : __fmaf_rn(number - mask_bias, kLog2e, x);
      }
      return kAlibi ? x + alibi.term(slope_log2(slope), key) : x;
    };
    const auto kept_value = [&](int key, int channel) {
      if (kMasked && a.mask_rows.number(q_tile.batch, q_tile.head, query, key) == -INFINITY) return 0.f;
      return kDrops && a.dropout.drops(q_tile.sequence, q_tile.head, query, key) ? 0.f : value(key, channel);
    };
    UnmaskedRow<Dims::kDimV> row = attend_row<Dims::kDimV>(keys_of(query), a.dim_v, logit, kept_value);
    const float mean_logit =
        kQuantizedQk && a.mean_logit ? a.scale * a.mean_logit[a.scheduler.row_of(q_tile) + query] : 0.f;
    RowSum<kBiased> sum{row.log2_sum, kAlibi ? alibi.row_bias(slope) : kMasked ? mask_bias : mean_logit};
    row.scale(sum.add_sink(a.sinks.at(q_tile.batch, q_tile.head)), [&](int channel) -> float2 {
      return {v_scale_of(kv), kCompensated<Precision> && !kDrops ? a.v_mean[kv * Dims::kDimV + channel] : 0.f};
    });
    return row;
  };
  rewrite_rows<Dims::kDimV>(a.o, a.o_residual, {q_tile.batch, q_tile.head, q_tile.q_first, first, q_tile.q_tokens},
                            a.dim_v, row_of);
}

}  // namespace octet::cuda::sm90
