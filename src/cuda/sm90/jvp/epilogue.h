// The epilogue of the jvp pass: o, to, lse and tlse, and the recomputation of rows that a masked inf or NaN has
// reached.
#pragma once
#include "cuda/sm90/jvp/jvp.h"

namespace octet::cuda::sm90 {

template <class T, class Dims>
__device__ void Jvp<T, Dims>::store(const TileInfo& q_tile, int query, const Output& to,
                                    const Accumulator<Dims::kDimV>& x) const {
  with_output_type(to.element, [&](auto* type) {
    using Type = std::remove_pointer_t<decltype(type)>;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int i = query + 8 * row;
      store_row(to.row<Type>(q_tile.batch, q_tile.head, int64_t{q_tile.q_first} + i), i < q_tile.q_tokens, x, row,
                a.dim_v);
    }
  });
}

template <class T, class Dims>
__device__ void Jvp<T, Dims>::write(int warpgroup, const Block& block, const Rows& rows, UO& uo) const {
  const TileInfo& q_tile = block.q_tile;
  const int query = q_tile.q_start + ptx::opaque(warpgroup) * kWarpgroupRows + fragment_row();
  // All rows of a warp meet the same v and tv, so that one of them is enough.
  const bool nonfinite =
      __any_sync(~0u, has_infinite<Dims::kDimV>(second_half(uo)) || has_infinite<Dims::kDimV>(first_half(uo)));
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    const FinishedRow f =
        finish(q_tile, rows.m[row] * a.scale_log2e, rows.centre[row], quad_sum(rows.l[row]), quad_sum(rows.r[row]));
    ptx::fence_operand(uo.x);  // else loads and sums that belong to the other row come between
    const int i = query + 8 * row;
    if (i < q_tile.q_tokens && threadIdx.x % 4 == 0) {
      const int64_t token = int64_t{q_tile.q_first} + i;
      if (a.lse.data) *a.lse.row<float>(q_tile.batch, q_tile.head, token) = f.lse;
      if (a.tlse.data) *a.tlse.row<float>(q_tile.batch, q_tile.head, token) = f.tlse;
    }
#pragma unroll
    for (int j = 0; j < Dims::kDimV / 8; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        f.apply(second_half(uo).x[4 * j + 2 * row + c], first_half(uo).x[4 * j + 2 * row + c]);
  }
  store(q_tile, query, a.o, second_half(uo)), store(q_tile, query, a.to, first_half(uo));
  if (a.mask.windowed && nonfinite) recompute_rows(q_tile, ptx::opaque(warpgroup));
}

// Recomputes the rows of this warp that are not finite from the keys that they see.
template <class T, class Dims>
__device__ void Jvp<T, Dims>::recompute_rows(const TileInfo& q_tile, int warpgroup) const {
  const int kv_head = q_tile.head / a.group, warp = static_cast<int>(threadIdx.x % kWarpgroup / 32);
  const WarpQueries rows{q_tile.batch, q_tile.head, q_tile.q_first,
                         q_tile.q_start + warpgroup * kWarpgroupRows + warp * kWarpRows, q_tile.q_tokens};
  const auto query_row = [&](const JvpInput& x, int query) {
    return x.rows.row<T>(q_tile.batch, q_tile.head, int64_t{q_tile.q_first} + query);
  };
  const auto key_row = [&](const JvpInput& x, int key) {
    return x.rows.row<T>(q_tile.batch, kv_head, int64_t{q_tile.k_first} + key);
  };
  const auto keys_of = [&](int query) { return a.mask.keys_of(query, q_tile.q_tokens, q_tile.k_tokens); };
  const auto logit = [&](int query, int key) -> float2 {
    const T *const q = query_row(a.q, query), *const k = key_row(a.k, key);
    return {a.scale * dot(q, k, a.dim),
            a.scale * (dot(query_row(a.tq, query), k, a.dim) + dot(q, key_row(a.tk, key), a.dim))};
  };
  const auto keeps = [](int, int) { return true; };
  const auto value = [&](int key, int channel) -> float2 {
    return {float(key_row(a.v, key)[channel]), float(key_row(a.tv, key)[channel])};
  };
  const auto finish_row = [&](int, float m, float l, float r) { return finish(q_tile, m * kLog2e, 0.f, l, r); };
  rewrite_jvp_rows<Dims::kDimV>(a.o, a.to, rows, 0, a.dim_v, keys_of, logit, keeps, value, finish_row);
}

}  // namespace octet::cuda::sm90
