// The mainloop of the jvp pass. sm80/jvp/jvp.h has the algorithm.
#pragma once
#include "cuda/sm80/jvp/jvp.h"

namespace octet::cuda::sm80 {

template <class T, int Dim, Logits logits, Tangents tangents>
__device__ void Jvp<T, Dim, logits, tangents>::find_tile(unsigned tile) {
  if (threadIdx.x == 0) {
    const TileInfo found = a.scheduler.at(tile);
    shared.q_tile = found;
    if (found.valid()) {
      const int n = found.q_tokens, m = found.k_tokens;
      const Interval any = a.mask.keys_of_all(found.q_start, min(found.q_start + kRows, n), n, m).any;
      shared.keys = {any.first / kKeys * kKeys, any.last};
      shared.seen = a.mask.seen(n, m);
      const int kv_head = found.head / a.group;
      shared.k_start = a.k.row<Element>(found.batch, kv_head, found.k_first);
      shared.tk_start = a.tk.row<Element>(found.batch, kv_head, found.k_first);
      shared.v_start = a.v.row<Element>(found.batch, kv_head, found.k_first) + first_column();
      shared.tv_start = a.tv.row<Element>(found.batch, kv_head, found.k_first) + first_column();
      Operands::start_factors(*this, kv_head);
    }
  }
  __syncthreads();
}

// Loads a tile of a tensor, which each of its tiles in shared memory has a part of.
template <class T, int Dim, Logits logits, Tangents tangents>
template <class SharedTile>
__device__ void Jvp<T, Dim, logits, tangents>::load(unsigned char* to, const Element* from, int64_t stride,
                                                    const Interval& rows, int columns) const {
#pragma unroll 1
  for (int part = 0; part < Operands::kTiles; ++part)
    load_async<kThreads>(SharedTile{to + part * SharedTile::kBytes}, from + part * Dim, stride, rows, columns);
}

template <class T, int Dim, Logits logits, Tangents tangents>
__device__ void Jvp<T, Dim, logits, tangents>::load_queries() const {
  const TileInfo& w = shared.q_tile;
  const Interval rows{0, w.q_tokens - w.q_start};
  const int64_t token = int64_t{w.q_first} + w.q_start;
  load<TileQ>(shared.q, query_row(a.q, token), a.q.stride[2], rows, a.dim);
  if (has(a.tq)) load<TileQ>(shared.tq, query_row(a.tq, token), a.tq.stride[2], rows, a.dim);
  Operands::load_query_factors(*this, rows);
}

// Loads a tile of k and tk. Rows that no query sees, or of the next packed sequence, become zeros: they may hold inf or
// NaN.
template <class T, int Dim, Logits logits, Tangents tangents>
__device__ void Jvp<T, Dim, logits, tangents>::load_k(int key) const {
  const Interval rows{shared.seen.first - key, shared.seen.last - key};
  load<TileK>(shared.k, shared.k_start + key * a.k.stride[2], a.k.stride[2], rows, a.dim);
  if (has(a.tk)) load<TileK>(shared.tk, shared.tk_start + key * a.tk.stride[2], a.tk.stride[2], rows, a.dim);
  Operands::load_key_factors(*this, key, rows);
}

template <class T, int Dim, Logits logits, Tangents tangents>
__device__ void Jvp<T, Dim, logits, tangents>::load_v(int key) const {
  const Interval rows{shared.seen.first - key, shared.seen.last - key};
  const int columns = a.dim_v - first_column();
  load<TileV>(v_tiles(), shared.v_start + key * a.v.stride[2], a.v.stride[2], rows, columns);
  if (has(a.tv)) load<TileV>(tv_tiles(), shared.tv_start + key * a.tv.stride[2], a.tv.stride[2], rows, columns);
  Operands::load_value_factors(*this, key, rows);
}

// Loads a tile of the mask tensor for the rows of this warp.
template <class T, int Dim, Logits logits, Tangents tangents>
__device__ void Jvp<T, Dim, logits, tangents>::load_mask(int key) const {
  if (!stages_mask()) return;
  const TileInfo& w = shared.q_tile;
  load_mask_tile<32, 16, kKeys>(shared.mask + 16 * warp() * mask_row_bytes(kKeys, a.terms.mask_bytes),
                                static_cast<int>(threadIdx.x) % 32, a.terms, w.batch, w.head, w.q_start + 16 * warp(),
                                w.q_tokens, key, w.k_tokens);
}

template <class T, int Dim, Logits logits, Tangents tangents>
__device__ RowTerms Jvp<T, Dim, logits, tangents>::terms_of(int query) const {
  const TileInfo& w = shared.q_tile;
  return row_terms(a.terms, w.batch, w.sequence, w.head, query, w.q_tokens, w.k_tokens, range_of(query));
}

// Turns products into logits and their tangents: scaled only with general logits. Logits of unseen keys become -inf.
template <class T, int Dim, Logits logits, Tangents tangents>
__device__ void Jvp<T, Dim, logits, tangents>::take_logits(S& s, S& t, int key) const {
  const int query = ptx::opaque(thread_query());
  if constexpr (kGeneral) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      t.x[i] *= a.scale;
      if (a.terms.softcap == 0.f) continue;
      const Capped capped = softcap(a.terms, s.x[i] * a.scale);
      s.x[i] = capped.x, t.x[i] *= capped.derivative;
    }
    const float scale = a.terms.softcap != 0.f ? 1.f : a.scale;
    if (stages_mask() && !a.terms.slopes) {
      const int row = query - shared.q_tile.q_start;
      const MaskFragment<kKeys> mask{shared.mask, a.terms.element, row, fragment_column()};
      mask.add(s, scale, {shared.row_bias[row], shared.row_bias[row + 8]});
      mask.hide(s);
    } else {
      const RowTerms terms[] = {terms_of(query), terms_of(query + 8)};
      add_terms(s, scale, a.terms, terms, key, shared.q_tile.k_tokens);
    }
  }
  const TileInfo& w = shared.q_tile;
  const int first = w.q_start + 16 * warp();
  if (range_of(first).last >= key + kKeys && range_of(first + 15).first <= key) return;
  const Interval ranges[] = {range_of(query), range_of(query + 8)};
  mask_rows(s, key, ranges);
}

// Turns logits and their tangents into p and h, rounded; returns the factors of earlier sums.
template <class T, int Dim, Logits logits, Tangents tangents>
__device__ RowValues Jvp<T, Dim, logits, tangents>::take_exp(S& s, S& t, Rows& rows, P& p, P& h) const {
  const float scale = kGeneral ? 1.f : a.scale, scale_log2 = scale * 1.44269504f;
  RowValues rescale;
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    const float old = rows.m[row], most = quad_max(row_max(s, row, old));
    const float origin = most == -INFINITY ? 0.f : most * scale_log2;  // -inf: the row has seen no key yet
    rescale[row] = ptx::exp2(__fmaf_rn(old, scale_log2, -origin));
    rows.m[row] = most;
    float sum = 0.f, weighted = 0.f;
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float &x = s.x[4 * i + 2 * row + c], &y = t.x[4 * i + 2 * row + c];
        x = ptx::exp2(__fmaf_rn(x, scale_log2, -origin));
        y = x == 0.f ? 0.f : y * scale;  // what belongs to an unseen key may be anything
        sum += x, weighted = __fmaf_rn(x, y, weighted);
      }
    if (__any_sync(~0u, old == kNone && most != kNone)) {
      sum = quad_sum(sum), weighted = quad_sum(weighted);
      if (old == kNone && most != kNone) rows.centre[row] = weighted / sum;
    }
    float l = rows.l[row] * rescale[row], r = rows.r[row] * rescale[row];
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i) {
      float* const x = &s.x[4 * i + 2 * row];
      float* const y = &t.x[4 * i + 2 * row];
      for (int c = 0; c < 2; ++c) y[c] = x[c] == 0.f ? 0.f : x[c] * (y[c] - rows.centre[row]);
      const float2 rounded_p = p.put(2 * i + row, x[0], x[1]), rounded_h = h.put(2 * i + row, y[0], y[1]);
      l += rounded_p.x + rounded_p.y, r += rounded_h.x + rounded_h.y;
    }
    rows.l[row] = l, rows.r[row] = r;
  }
  return rescale;
}

// Takes the elements that dropout drops from p and h, whose sums keep them.
template <class T, int Dim, Logits logits, Tangents tangents>
__device__ void Jvp<T, Dim, logits, tangents>::drop_p_and_h(P& p, P& h, int key) const {
  if (!kGeneral || !a.dropout.seed) return;
  KeptElements<kKeys, RowTokens::queries> kept;
  kept.find(a.dropout.stream(shared.q_tile.sequence, shared.q_tile.head), a.dropout.dropped, thread_query(), key);
  drop(p.x, kept), drop(h.x, kept);
}

template <class T, int Dim, Logits logits, Tangents tangents>
__device__ void Jvp<T, Dim, logits, tangents>::run(unsigned tile) {
  find_tile(tile);
  if (!shared.q_tile.valid()) return;
  const int last = shared.keys.last;
  int key = shared.keys.first;
  load_queries();
  if (key < last) load_k(key), load_mask(key);
  ptx::cp_async_commit();
  if constexpr (kStagesMask)
    for (int i = static_cast<int>(threadIdx.x); i < kRows; i += kThreads)
      shared.row_bias[i] = stages_mask() && a.terms.row_bias
                               ? *a.terms.row_bias_at(shared.q_tile.batch, shared.q_tile.head,
                                                      min(shared.q_tile.q_start + i, shared.q_tile.q_tokens - 1))
                               : 0.f;
  if (!Tile::kLateV && key < last) load_v(key);
  ptx::cp_async_commit();
  constexpr int kAhead = Tile::kLateV ? 0 : 1;  // groups that may be on their way
  Rows rows;
  O o, u;
  o.zero(), u.zero();
#pragma unroll 1
  for (; key < last; key += kKeys) {
    const bool more = key + kKeys < last;
    ptx::cp_async_wait<kAhead>();
    __syncthreads();  // k has arrived
    S s, t;
    Operands::multiply_qk(*this, s, t);
    __syncthreads();  // all warps have read k
    if constexpr (Tile::kLateV)
      load_v(key);
    else if (more)
      load_k(key + kKeys);
    if constexpr (!kStagesMask) ptx::cp_async_commit();
    take_logits(s, t, key);
    if constexpr (kStagesMask) {
      __syncwarp();  // all lanes have read the mask
      if (more) load_mask(key + kKeys);
      ptx::cp_async_commit();
    }
    P p, h;
    const RowValues rescale = take_exp(s, t, rows, p, h);
    drop_p_and_h(p, h, key);
    scale_rows(o, rescale), scale_rows(u, rescale);
    ptx::cp_async_wait<kAhead>();
    __syncthreads();  // v has arrived
    Operands::multiply_pv(*this, o, u, p, h);
    __syncthreads();  // all warps have read v
    if (more) Tile::kLateV ? load_k(key + kKeys) : load_v(key + kKeys);
    ptx::cp_async_commit();
  }
  ptx::cp_async_wait<0>();
  write(rows, o, u);
}

}  // namespace octet::cuda::sm80
