// The epilogue of the 8-bit forward pass: o = o / l, its residual, lse, and the recomputation of rows that a masked NaN
// has reached.
#pragma once
#include "cuda/fragment/finish.h"
#include "cuda/fragment/o_residual.h"
#include "cuda/sm90/fwd/forward_8bit.h"

namespace octet::cuda::sm90 {

template <class Precision, class Dims>
__device__ inline void Forward8Bit<Precision, Dims>::write(const TileInfo& q_tile, int query, const Softmax& softmax,
                                                           const Accumulator<kColumns>& sums) const {
  RowValues inverse, lse, share{1.f, 1.f};
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    float l, partial_l;  // l with the truncation that o has, and l from partial sums that lose less
    if constexpr (Precision::kSumRounded) {
      const float* columns = &sums.x[2 * Dims::kDimV / 4 + 2 * row];
      l = __shfl_sync(~0u, columns[0], threadIdx.x % 32 / 4 * 4);
      partial_l = quad_sum((threadIdx.x % 4 ? columns[0] : 0.f) + columns[1]);
    } else {
      l = partial_l = quad_sum(softmax.l[row]);
    }
    const int i = query + 8 * row;
    const Interval seen = keys_of(q_tile, i);
    if (seen.first == seen.last) l = 0.f;  // whatever the scale is
    const float mean_logit =
        a.mean_logit && i < q_tile.q_tokens ? a.scale * a.mean_logit[a.scheduler.row_of(q_tile) + i] : 0.f;
    constexpr float kScale = kScaled ? kInverseScale : 1.f, kScaleLog2 = kScaled ? kInverseScaleLog2 : 0.f;  // of l
    inverse[row] = l == 0.f ? 0.f : l < INFINITY ? kScale / l : NAN;
    RowSum<> sum = RowSum<>::of(softmax.exponent(row) - kScaleLog2, l == 0.f ? 0.f : partial_l, mean_logit);
    if (a.sinks.data) share[row] = sum.add_sink(a.sinks.at(q_tile.batch, q_tile.head));
    lse[row] = sum.lse();
  }
  const int64_t batch_head =
      static_cast<int64_t>(q_tile.sequence) * (a.scheduler.heads / a.group) + q_tile.head / a.group;
  Accumulator<Dims::kDimV> o;
#pragma unroll
  for (int i = 0; i < Dims::kDimV / 8; ++i) {
    const int64_t channel = batch_head * Dims::kDimV + 8 * i + fragment_column();
    float2 scale{1.f, 1.f}, mean{0.f, 0.f};
    if (a.v_channel_scale) scale = *reinterpret_cast<const float2*>(a.v_channel_scale + channel);
    if (a.v_mean) mean = *reinterpret_cast<const float2*>(a.v_mean + channel);
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int at = 4 * i + 2 * row;
      const bool seen = inverse[row] != 0.f;
      o.x[at] = seen ? sums.x[at] * inverse[row] * scale.x + mean.x : 0.f;
      o.x[at + 1] = seen ? sums.x[at + 1] * inverse[row] * scale.y + mean.y : 0.f;
    }
  }
  if (a.sinks.data) scale_rows(o, share);
  with_output_type<true>(a.o.element,
                         [&](auto* type) { write_as<std::remove_pointer_t<decltype(type)>>(q_tile, query, lse, o); });
  // An e4m3 value that is not finite is NaN, which 0 times it stays. With kScaled, v is int8 and only its scales can be
  // NaN, which a masked P does not meet.
  if constexpr (!kScaled)
    if (a.mask.windowed && __any_sync(~0u, has_infinite<Dims::kDimV>(sums))) recompute_rows(q_tile, ptx::opaque(query));
}

template <class Precision, class Dims>
template <class T>
__device__ inline void Forward8Bit<Precision, Dims>::write_as(const TileInfo& q_tile, int query, const RowValues& lse,
                                                              Accumulator<Dims::kDimV>& o) const {
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    const int i = query + 8 * row;
    const bool present = i < q_tile.q_tokens;
    const int64_t token = static_cast<int64_t>(q_tile.q_first) + i;
    store_row(a.o.row<T>(q_tile.batch, q_tile.head, token), present, o, row, a.dim_v);
    if (a.lse.data && present && threadIdx.x % 4 == 0) *a.lse.row<float>(q_tile.batch, q_tile.head, token) = lse[row];
  }
  // opaque(): keeping what the loop above has computed of `query` would spill.
  const auto offset = [&](int row) {
    return a.o_residual.offset(q_tile.batch, q_tile.head, int64_t{q_tile.q_first} + ptx::opaque(query) + 8 * row);
  };
  const auto present = [&](int row) { return ptx::opaque(query) + 8 * row < q_tile.q_tokens; };
  store_residuals<T, false>(a.o_residual, o, a.dim_v, offset, present);
}

// Recomputes the rows of this warp that are not finite from the keys that they see. `query` is the first of this
// thread's two rows.
template <class Precision, class Dims>
__device__ inline void Forward8Bit<Precision, Dims>::recompute_rows(const TileInfo& q_tile, int query) const {
  using QkType = typename Precision::QkType;
  const int kv_heads = a.scheduler.heads / a.group, kv_head = q_tile.head / a.group;
  const int quantized_first = first_key_of(q_tile), k_first = a.k_in_tiles ? quantized_first : q_tile.k_first;
  const int64_t kv = static_cast<int64_t>(q_tile.batch) * kv_heads + kv_head;
  const int64_t channels = (static_cast<int64_t>(q_tile.sequence) * kv_heads + kv_head) * Dims::kDimV;
  const auto scale_of = [&](int64_t index) {
    if constexpr (kKeyScales == KeyScales::none)
      return 1.f;
    else if constexpr (kKeyScales == KeyScales::tokens)
      return a.k_scale[index];
    else
      return a.k_scale[index / kGroupBlock * kScaleGroups + index % 8 / 2];
  };
  const auto value = [&](int key, int channel) {
    const int at = quantized_first + key, place = at % 8 / 2 * 4 + at / 8 % 2 * 2 + at % 2;  // see key_permutation
    const auto* const quantized = reinterpret_cast<const E4m3*>(a.v_quantized) + (kv * Dims::kDimV + channel) * a.keys;
    return float(quantized[at / 16 * 16 + place]);
  };
  const int first = query - static_cast<int>(threadIdx.x % 32 / 4);
  const auto keys_of = [&](int query) { return this->keys_of(q_tile, query); };
  const SeenTiles tiles = tiles_of(q_tile, q_tile.q_start, kRows);
  const Interval keys{tiles.first * kKeys, min(tiles.last * kKeys, q_tile.k_tokens)};
  if (!masks_infinite(keys, first, q_tile.q_tokens, a.dim_v, keys_of, value)) return;
  const auto row_of = [&](int query) {
    const auto* const q = a.q_rows.row<QkType>(q_tile.batch, q_tile.head, int64_t{q_tile.q_first} + query);
    const float scale_log2 = softmax_scale_log2(q_tile, query)[0];
    const auto logit = [&](int key) {
      return scale_log2 * scale_of(kv * a.keys + quantized_first + key) *
             dot(q, a.k_rows.row<QkType>(q_tile.batch, kv_head, int64_t{k_first} + key), a.dim);
    };
    UnmaskedRow<Dims::kDimV> row = attend_row<Dims::kDimV>(keys_of(query), a.dim_v, logit, value);
    RowSum<> sum{row.log2_sum, a.mean_logit ? a.scale * a.mean_logit[a.scheduler.row_of(q_tile) + query] : 0.f};
    row.scale(sum.add_sink(a.sinks.at(q_tile.batch, q_tile.head)), [&](int channel) -> float2 {
      return {a.v_channel_scale ? a.v_channel_scale[channels + channel] : 1.f, 0.f};
    });
    return row;
  };
  rewrite_rows<Dims::kDimV>(a.o, a.o_residual, {q_tile.batch, q_tile.head, q_tile.q_first, first, q_tile.q_tokens},
                            a.dim_v, row_of);
}

}  // namespace octet::cuda::sm90
