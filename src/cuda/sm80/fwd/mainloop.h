// The mainloop of the forward pass. sm80/fwd/forward.h has the algorithm.
#pragma once
#include "cuda/sm80/fwd/epilogue.h"

namespace octet::cuda::sm80 {

// Loads a tile of k and v. Rows that no query sees, or of the next packed sequence, may hold inf or NaN, and 0 times
// these would be NaN: they become zeros.
template <class Precision, class Dims, bool General>
__device__ inline void Forward<Precision, Dims, General>::load_keys(int tile, const Sources& from) const {
  const int key = tile * kKeys;
  const KeyRange rows{shared.seen.first - key, shared.seen.last - key};
  if (rows.first <= 0 && rows.last >= kKeys && a.whole_columns) {
    LoaderK::load(k(tile), from.k, a.k.stride[2]);
    LoaderV::load(v(tile), from.v, a.v.stride[2]);
  } else {
    LoaderK::load_part(k(tile), from.k, a.k.stride[2], rows, a.dim);
    LoaderV::load_part(v(tile), from.v, a.v.stride[2], rows, a.dim_v);
  }
}

// Loads a tile of the mask tensor for the rows of this warp.
template <class Precision, class Dims, bool General>
__device__ inline void Forward<Precision, Dims, General>::load_mask(int tile) const {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (!stages_mask() || tile < shared.warp_keys[warp].first || tile >= shared.warp_keys[warp].last) return;
  load_mask_async<kKeys, kRowsOfWarp>(shared.mask[warp], a.terms, shared.q_tile.batch, shared.q_tile.head, warp_query(),
                                      shared.q_tile.q_tokens, tile * kKeys, shared.q_tile.k_tokens);
}

// Computes the tile of queries of this thread block.
template <class Precision, class Dims, bool General>
__device__ inline void Forward<Precision, Dims, General>::run() const {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) shared.q_tile = a.scheduler.at(blockIdx.x);
  __syncthreads();
  if (!shared.q_tile.valid()) return;
  if (threadIdx.x == 0) {
    const int kv_head = shared.q_tile.head / a.group;
    shared.keys = keys_of(shared.q_tile.q_start, kRows);
    shared.seen = a.mask.seen(shared.q_tile.q_tokens, shared.q_tile.k_tokens);
    shared.k_start = a.k.row<QkType>(shared.q_tile.batch, kv_head, shared.q_tile.k_first);
    shared.v_start = a.v.row<PType>(shared.q_tile.batch, kv_head, shared.q_tile.k_first);
  }
  if (threadIdx.x % 32 == 0) shared.warp_keys[warp] = keys_of(warp_query(), kRowsOfWarp);
  if constexpr (General) start_terms();
  __syncthreads();
  const auto* const q_start =
      a.q.row<QkType>(shared.q_tile.batch, shared.q_tile.head, int64_t{shared.q_tile.q_first} + shared.q_tile.q_start);
  load_async<kThreads>(q(), q_start, a.q.stride[2], {0, shared.q_tile.q_tokens - shared.q_tile.q_start}, a.dim);
  ptx::cp_async_commit();
  int tile = shared.keys.last - 1;
  Sources sources = sources_of(tile);
  if (shared.keys.first <= tile) load_keys(tile, sources);
  ptx::cp_async_commit();
  // Of kernels with general logits, the groups of copies are in turn a tile of keys and one of the mask.
  constexpr int kMaskGroups = General ? 1 : 0;
  if constexpr (General) load_mask(shared.warp_keys[warp].last - 1), ptx::cp_async_commit();

  Softmax softmax[kRowBlocks];
  OTile o[kRowBlocks];
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block) {
    o[block].zero();
    softmax[block].scale_log2 = {a.scale_log2e, a.scale_log2e};
    if constexpr (General) softmax[block].beta = a.beta, softmax[block].reach = a.beta_reach;
  }
  Operand<QkType, Dims::kDim> q_rows[kRowBlocks];
  if constexpr (Tile::kQRegisters) {
    ptx::cp_async_wait<1 + kMaskGroups>();
    __syncthreads();
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) load_rows(q_rows[block], q(), warp * kRowBlocks + block);
  }

  // The verbs of the mainloop.
  const auto multiply_qk = [&](Accumulator<kKeys>(&s)[kRowBlocks], int tile) {
#pragma unroll
    for (Accumulator<kKeys>& each : s) each.zero();
    if constexpr (Tile::kQRegisters)
      mma_ABt(s, q_rows, k(tile));
    else
      mma_ABt(s, q(), warp * kRowBlocks, k(tile));
  };
  // Turns products into logits, and those of unseen keys into -inf.
  const auto take_logits = [&](Accumulator<kKeys>(&s)[kRowBlocks], int tile) {
    const KeyRange all = shared.warp_keys[warp].all;
    const bool masked = tile * kKeys < all.first || (tile + 1) * kKeys > all.last;
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
      const int query = ptx::opaque(thread_query(block));
      if constexpr (General) {
        const RowTerms terms[] = {terms_of(query), terms_of(query + 8)};
        const unsigned char* const row = shared.mask[Tile::kStagesMask ? warp : 0] +
                                         (block * kWarpRows + threadIdx.x % 32 / 4) * kMaskRowBytes<kKeys>;
        const unsigned char* const rows[] = {stages_mask() ? row : nullptr, row + 8 * kMaskRowBytes<kKeys>};
        add_terms(s[block], a.terms, terms, tile * kKeys, shared.q_tile.k_tokens, rows);
      }
      if (!masked) continue;
      const KeyRange ranges[] = {range_of(query), range_of(query + 8)};
      mask_rows(s[block], tile * kKeys, ranges);
    }
  };
  // Turns logits into P. The maximum is that of earlier tiles, unless P would be too large.
  const auto take_exp = [&](Accumulator<kKeys>(&s)[kRowBlocks], Operand<PType, kKeys>(&p)[kRowBlocks]) {
    constexpr int kExponent = Precision::kPExponent;
    if constexpr (General)
      if (a.beta != 0.f) {
#pragma unroll
        for (int block = 0; block < kRowBlocks; ++block) {
          scale_rows(o[block], softmax[block].template exp_update_max<kExponent>(s[block]));
          convert(s[block], p[block]);
        }
        return;
      }
    RowValues most[kRowBlocks];
    bool fits = true;
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) most[block][row] = row_max(s[block], row, -INFINITY);
      fits &= softmax[block].template fits_stale_max<kExponent>(most[block], (kMaxPLog2<Precision, General>));
    }
    if (!__all_sync(~0u, fits))
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block)
        scale_rows(o[block], softmax[block].template update_max<kExponent>(most[block]));
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block)
      softmax[block].template exp_and_sum<kExponent>(s[block]), convert(s[block], p[block]);
  };
  // Half way through its tiles, a warp flips the sign of a compensated o.
  const auto flips_after = [&](int tile) {
    const Keys& mine = shared.warp_keys[warp];
    return mine.last - mine.first > 1 && tile == mine.last - 1 - (mine.last - mine.first) / 2;
  };

#pragma unroll 1
  for (; tile >= shared.keys.first; --tile) {
    ptx::cp_async_wait<kMaskGroups>();
    __syncthreads();  // the tile has arrived, and the other stage has been read
    if constexpr (kKeepsSources) sources.k -= kKeys * a.k.stride[2], sources.v -= kKeys * a.v.stride[2];
    if (tile > shared.keys.first) load_keys(tile - 1, kKeepsSources ? sources : sources_of(tile - 1));
    ptx::cp_async_commit();
    if (tile < shared.warp_keys[warp].first || tile >= shared.warp_keys[warp].last) {
      if constexpr (General) ptx::cp_async_commit();
      continue;
    }
    Accumulator<kKeys> s[kRowBlocks];
    multiply_qk(s, tile);
    if constexpr (General) ptx::cp_async_wait<1>(), __syncwarp();  // the tile of the mask has arrived
    take_logits(s, tile);
    if constexpr (General) __syncwarp(), load_mask(tile - 1), ptx::cp_async_commit();
    Operand<PType, kKeys> p[kRowBlocks];
    take_exp(s, p);
    mma_AB(o, p, v(tile));
    if constexpr (kCompensated<Precision>)
      if (flips_after(tile)) flip(softmax, o);
  }
  ptx::cp_async_wait<0>();
  if constexpr (kCompensated<Precision>)
    if (shared.warp_keys[warp].last - shared.warp_keys[warp].first > 1) unflip(softmax, o);
  write(softmax, o);
}

}  // namespace octet::cuda::sm80
