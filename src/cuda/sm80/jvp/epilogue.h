// The epilogue of the jvp pass: o, to, lse and tlse, and the recomputation of rows that an inf or NaN has reached
// from behind a mask or from a dropped element.
#pragma once
#include "cuda/fragment/unmasked_row.h"
#include "cuda/sm80/jvp/jvp.h"

namespace octet::cuda::sm80 {

// Returns what becomes of the sums of a row.
template <class T, int Dim, Logits logits>
__device__ FinishedRow Jvp<T, Dim, logits>::finish(int query, float m, float centre, float l, float r) const {
  const float origin = m * ((kGeneral ? 1.f : a.scale) * kLog2e), row_bias = kGeneral ? terms_of(query).row_bias : 0.f;
  return {{centre, l, r},     RowSum<>::of(origin, l, row_bias), a.sinks, a.tsinks, shared.q_tile.batch,
          shared.q_tile.head, kGeneral ? a.dropout.scale : 1.f};
}

template <class T, int Dim, Logits logits>
__device__ void Jvp<T, Dim, logits>::store(const Output& to, int query, const O& x) const {
  const TileInfo& w = shared.q_tile;
  const auto store_as = [&](auto* type) {
    using Type = std::remove_pointer_t<decltype(type)>;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int i = query + 8 * row;
      store_row<Type>(to.row<Type>(w.batch, w.head, int64_t{w.q_first} + i) + first_column(), i < w.q_tokens, x, row,
                      a.dim_v - first_column());
    }
  };
  with_output_type(to.element, store_as);
}

template <class T, int Dim, Logits logits>
__device__ void Jvp<T, Dim, logits>::write(const Rows& rows, O& o, O& u) const {
  const TileInfo& w = shared.q_tile;
  const int query = thread_query();
  // All rows of a warp meet the same v and tv, so that one of them is enough.
  const bool nonfinite = has_infinite<kDimV>(o) || has_infinite<kDimV>(u);
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    const int i = query + 8 * row;
    const FinishedRow f = finish(i, rows.m[row], rows.centre[row], quad_sum(rows.l[row]), quad_sum(rows.r[row]));
#pragma unroll
    for (int j = 0; j < kDimV / 8; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) f.apply(o.x[4 * j + 2 * row + c], u.x[4 * j + 2 * row + c]);
    if (i >= w.q_tokens || threadIdx.x % 4 || first_column() > 0) continue;
    if (a.lse.data) *a.lse.row<float>(w.batch, w.head, int64_t{w.q_first} + i) = f.lse;
    if (a.tlse.data) *a.tlse.row<float>(w.batch, w.head, int64_t{w.q_first} + i) = f.tlse;
  }
  store(a.o, query, o), store(a.to, query, u);
  const bool hides_keys = a.mask.windowed || (kGeneral && (a.terms.mask || a.dropout.seed));
  if (hides_keys && __any_sync(~0u, nonfinite)) recompute_rows();
}

// Recomputes those rows of this warp that are not finite from the keys that they see.
template <class T, int Dim, Logits logits>
__device__ void Jvp<T, Dim, logits>::recompute_rows() const {
  constexpr int kChannels = kDimV / 32;
  const TileInfo& w = shared.q_tile;
  const WarpQueries rows{w.batch, w.head, w.q_first, w.q_start + 16 * warp(), w.q_tokens};
  const int columns = min(a.dim_v - first_column(), kDimV);
  const auto number = [&](const Output& t, int query, int c) {
    return number_at(t, rows.offset(t, query) + first_column() + c);
  };
  const auto finite = [&](int query, int c) {
    return isfinite(number(a.o, query, c)) && isfinite(number(a.to, query, c));
  };
  for_nonfinite_rows(rows, columns, finite, [&](int query, int lane) {
    const int64_t token = int64_t{w.q_first} + query;
    const T *const q = a.q.row<T>(w.batch, w.head, token), *const tq = a.tq.row<T>(w.batch, w.head, token);
    const Interval keys = range_of(query);
    const RowTerms terms = kGeneral ? terms_of(query) : RowTerms{};
    float o[kChannels]{}, u[kChannels]{}, m = -INFINITY, l = 0.f, r = 0.f;
#pragma unroll 1
    for (int start = keys.first; start < keys.last; start += 32) {
      const int64_t key = min(start + lane, keys.last - 1);
      const T *const k = shared.k_start + key * a.k.stride[2], *const tk = shared.tk_start + key * a.tk.stride[2];
      const float product = dot(q, k, a.dim);
      float x = product * a.scale, t = a.scale * (dot(tq, k, a.dim) + dot(q, tk, a.dim));
      if constexpr (kGeneral) {
        x = logit_of(a.terms, terms, static_cast<int>(key), product);
        if (a.terms.softcap != 0.f) t *= softcap(a.terms, product * a.scale).derivative;
      }
      if (start + lane >= keys.last) x = -INFINITY;
      float most = fmaxf(m, x);
      for (int offset = 16; offset; offset /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
      const float from = most == -INFINITY ? 0.f : most, rescale = expf(m - from), p = expf(x - from);
      const float h = p == 0.f ? 0.f : p * t;
      float sum = p, sum_h = h;
      for (int offset = 16; offset; offset /= 2)
        sum += __shfl_xor_sync(~0u, sum, offset), sum_h += __shfl_xor_sync(~0u, sum_h, offset);
      l = l * rescale + sum, r = r * rescale + sum_h, m = most;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) o[c] *= rescale, u[c] *= rescale;
#pragma unroll 1
      for (int i = 0; i < min(32, keys.last - start); ++i) {
        const float of_p = __shfl_sync(~0u, p, i), of_h = __shfl_sync(~0u, h, i);
        if (of_p == 0.f) continue;  // what hides a key leaves it a p of 0
        if (kGeneral && a.dropout.drops(w.sequence, w.head, query, start + i)) continue;
        const T* const v = shared.v_start + int64_t{start + i} * a.v.stride[2];
        const T* const tv = shared.tv_start + int64_t{start + i} * a.tv.stride[2];
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          if (lane + 32 * c >= columns) continue;
          const float value = float(v[lane + 32 * c]);
          o[c] = fmaf(of_p, value, o[c]);
          u[c] = fmaf(of_p, float(tv[lane + 32 * c]), fmaf(of_h, value, u[c]));
        }
      }
    }
    // m is a logit here, whatever the kernel's own is.
    const FinishedRow f = finish(query, kGeneral ? m : m / a.scale, 0.f, l, r);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      if (lane + 32 * c >= columns) continue;
      f.apply(o[c], u[c]);
      const int channel = first_column() + lane + 32 * c;
      set_number(a.o, rows.offset(a.o, query) + channel, o[c]),
          set_number(a.to, rows.offset(a.to, query) + channel, u[c]);
    }
  });
}

}  // namespace octet::cuda::sm80
