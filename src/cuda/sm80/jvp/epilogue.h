// The epilogue of the jvp pass: o, to, lse and tlse, and the recomputation of rows that an inf or NaN has reached
// from behind a mask or from a dropped element.
#pragma once
#include "cuda/fragment/unmasked_jvp_row.h"
#include "cuda/sm80/jvp/jvp.h"

namespace octet::cuda::sm80 {

// Returns what becomes of the sums of a row.
template <class T, int Dim, Logits logits, Tangents tangents>
__device__ FinishedRow Jvp<T, Dim, logits, tangents>::finish(int query, float m, float centre, float l, float r) const {
  const float origin = m * ((kGeneral ? 1.f : a.scale) * kLog2e), row_bias = kGeneral ? terms_of(query).row_bias : 0.f;
  return {{centre, l, r},     RowSum<>::of(origin, l, row_bias), a.sinks, a.tsinks, shared.q_tile.batch,
          shared.q_tile.head, kGeneral ? a.dropout.scale : 1.f};
}

template <class T, int Dim, Logits logits, Tangents tangents>
__device__ void Jvp<T, Dim, logits, tangents>::store(const Output& to, int query, const O& x) const {
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

template <class T, int Dim, Logits logits, Tangents tangents>
__device__ void Jvp<T, Dim, logits, tangents>::write(const Rows& rows, O& o, O& u) const {
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
template <class T, int Dim, Logits logits, Tangents tangents>
__device__ void Jvp<T, Dim, logits, tangents>::recompute_rows() const {
  const TileInfo& w = shared.q_tile;
  const WarpQueries rows{w.batch, w.head, w.q_first, w.q_start + 16 * warp(), w.q_tokens};
  const auto keys_of = [&](int query) { return range_of(query); };
  const auto logit = [&](int query, int key) -> float2 {
    const float2 products = Operands::products(*this, query, key);
    float x = products.x * a.scale, t = a.scale * products.y;
    if constexpr (kGeneral) {
      x = logit_of(a.terms, terms_of(query), key, products.x);
      if (a.terms.softcap != 0.f) t *= softcap(a.terms, products.x * a.scale).derivative;
    }
    return {x, t};
  };
  const auto keeps = [&](int query, int key) { return !kGeneral || !a.dropout.drops(w.sequence, w.head, query, key); };
  const auto value = [&](int key, int channel) -> float2 {
    return Operands::values(*this, key, channel - first_column());  // shared.v_start is at that of the thread block
  };
  // m is a logit, whatever the kernel's own is.
  const auto finish_row = [&](int query, float m, float l, float r) {
    return finish(query, kGeneral ? m : m / a.scale, 0.f, l, r);
  };
  rewrite_jvp_rows<kDimV>(a.o, a.to, rows, first_column(), min(a.dim_v - first_column(), kDimV), keys_of, logit, keeps,
                          value, finish_row);
}

}  // namespace octet::cuda::sm80
