// The mainloop of the forward pass. sm80/fwd/forward.h has the algorithm.
#pragma once
#include "cuda/sm80/fwd/epilogue.h"

namespace octet::cuda::sm80 {

// Loads the rows of q.
template <class Kind>
__device__ inline void Forward<Kind>::load_q() const {
  if constexpr (Operands::kConvertsQ) return;
  const int start = shared.q_tile.q_start;
  const auto row_of_q = [&](int row) {
    return a.q.row<QkType>(shared.q_tile.batch, head_of(row), int64_t{shared.q_tile.q_first} + query_of(row));
  };
#pragma unroll
  for (int which = 0; which < Operands::kTiles; ++which) {
    if constexpr (kPairs) {
      constexpr int kColumns = kChunkColumns<QkType>, kChunks = Dims::kDim / kColumns;
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kThreads) {
        const int row = i / kChunks, column = i % kChunks * kColumns;
        const bool present = start + row < rows_end() && column < a.dim;
        ptx::cp_async(q(which).address() + TileQ::offset(row, i % kChunks),
                      row_of_q(present ? start + row : start) + which * Dims::kDim + (present ? column : 0),
                      present ? kChunkBytes : 0);
      }
    } else {
      load_async<kThreads>(q(which), row_of_q(start) + which * Dims::kDim, a.q.stride[2],
                           {0, shared.q_tile.q_tokens - start}, a.dim);
    }
  }
}

// Looks up the page of this lane's row of a tile.
template <class Kind>
__device__ inline int Forward<Kind>::page_of_lane(int tile) const {
  if constexpr (!kPaged) return 0;
  const int key = tile * kKeys + paged_row();
  const bool present = tile >= shared.tiles.first && key >= shared.seen.first && key < shared.seen.last;
  return present ? static_cast<int>(a.pages.page(shared.q_tile.sequence, key)) : 0;
}

// Returns how many bytes of a chunk lie in a row that has so many columns left; rows of 16 bits have whole chunks.
template <class T>
__device__ int bytes_of_chunk(int columns) {
  if constexpr (sizeof(T) > 1) return columns > 0 ? kChunkBytes : 0;
  return min(max(columns, 0), kChunkBytes);
}

// Loads `rows` of a tile of k, of v or of both from the pages of a cache; others become zeros.
template <class Kind>
template <bool OfK, bool OfV>
__device__ inline void Forward<Kind>::load_pages(int tile, const Interval& rows, int page_of_lane) const {
  static_assert(TileK::kColumns == TileV::kColumns && sizeof(KType) == sizeof(VType) && Operands::kTiles == 1);
  if constexpr (Operands::kHasFactors && OfK) Operands::load_paged_factors(*this, tile, rows, page_of_lane);
  const int own_row = paged_row();
  const bool own_present = own_row >= rows.first && own_row < rows.last;
  const unsigned token = own_present ? a.pages.token_in_page(tile * kKeys + own_row) : 0;
  const unsigned own_k = page_of_lane * a.k_chunks.of_page + token * a.k_chunks.of_token,
                 own_v = page_of_lane * a.v_chunks.of_page + token * a.v_chunks.of_token;
  const unsigned thread = ptx::opaque(static_cast<int>(threadIdx.x)), first = thread / LoaderK::kChunks,
                 chunk = thread % LoaderK::kChunks;
  const auto* const k_chunks = ptx::opaque(reinterpret_cast<const uint4*>(shared.k_start) + chunk);
  const auto* const v_chunks = ptx::opaque(reinterpret_cast<const uint4*>(shared.v_start) + chunk);
  const uint32_t to_k = k(tile).address(), to_v = v(tile).address(), to_first = TileK::offset(first, chunk);
  const auto each = [&](const auto& load_k, const auto& load_v) {
#pragma unroll
    for (int i = 0; i < LoaderK::kLoads; ++i) {
      const unsigned row = first + i * LoaderK::kRowsAtOnce, lane = first % kRowsOfLoad + i * kRowsOfLoad;
      const bool repeats = LoaderK::kRowsAtOnce % 8 == 0;  // as the swizzle does
      const uint32_t to = repeats ? to_first + i * LoaderK::kRowsAtOnce * TileK::kRowBytes : TileK::offset(row, chunk);
      if constexpr (OfK) load_k(static_cast<int>(row), to_k + to, k_chunks + __shfl_sync(~0u, own_k, lane));
      if constexpr (OfV) load_v(static_cast<int>(row), to_v + to, v_chunks + __shfl_sync(~0u, own_v, lane));
    }
  };
  if (rows.first <= 0 && rows.last >= kKeys && a.whole_columns) {
    const auto load = [](int, uint32_t to, const uint4* from) { ptx::cp_async(to, from); };
    return each(load, load);
  }
  const int column = static_cast<int>(chunk) * LoaderK::kChunk;
  const auto load_part = [&](int bytes) {
    return [&rows, bytes](int row, uint32_t to, const uint4* from) {
      ptx::cp_async(to, from, row >= rows.first && row < rows.last ? bytes : 0);
    };
  };
  each(load_part(bytes_of_chunk<KType>(a.dim - column)), load_part(bytes_of_chunk<KType>(a.dim_v - column)));
}

// Loads a tile of k and, unless it is late, of v. Rows that no query sees, or of the next packed sequence, may hold inf
// or NaN, and 0 times these would be NaN: they become zeros.
template <class Kind>
__device__ inline void Forward<Kind>::load_keys(int tile, const Sources& from, int page) const {
  const int key = tile * kKeys;
  const Interval rows{shared.seen.first - key, shared.seen.last - key};
  const bool whole = rows.first <= 0 && rows.last >= kKeys && a.whole_columns;
  if constexpr (kPaged) return load_pages<true, !Tile::kLateV>(tile, rows, page);
  Operands::load_key_factors(*this, tile, rows);
#pragma unroll
  for (int which = 0; which < Operands::kTiles; ++which) {
    const KType* const from_k = from.k + which * Dims::kDim;
    if (whole)
      LoaderK::load(k(tile, which), from_k, a.k.stride[2]);
    else
      LoaderK::load_part(k(tile, which), from_k, a.k.stride[2], rows, a.dim);
    if constexpr (!Tile::kLateV) Operands::load_v(*this, v(tile, which), from.v + which * Dims::kDimV, rows, whole);
  }
}

// Loads a tile of v that is late.
template <class Kind>
__device__ inline void Forward<Kind>::load_late_v(int tile, int page) const {
  static_assert(!Tile::kLateV || (Tile::kStages <= 2 && Operands::kTiles == 1));
  const Interval rows{shared.seen.first - tile * kKeys, shared.seen.last - tile * kKeys};
  const bool whole = rows.first <= 0 && rows.last >= kKeys && a.whole_columns;
  if constexpr (kPaged)
    load_pages<false, true>(tile, rows, page);
  else
    Operands::load_v(*this, v(tile), Operands::source_v(*this, tile), rows, whole);
  ptx::cp_async_commit();
}

// Loads a tile of the mask tensor for the rows of this warp, unless it has zeros alone.
template <class Kind>
__device__ inline void Forward<Kind>::load_mask(int tile, bool zeros) const {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (!stages_mask() || tile < shared.warp_tiles[warp].first || tile >= shared.warp_tiles[warp].last) return;
  if (zeros) return;
  unsigned char* const to = mask_tile() + warp * kRowsOfWarp * mask_row_bytes(kKeys, a.terms.mask_bytes);
  if constexpr (kMasked && Dims::kDimV == 64)  // with more channels it would spill registers
    if (warp_row() + kRowsOfWarp <= shared.q_tile.q_tokens && (tile + 1) * kKeys <= shared.q_tile.k_tokens) {
      const int64_t stride = a.terms.mask_stride[2] * a.terms.mask_bytes;
      return load_whole_mask_tile<kRowsOfWarp, kKeys>(
          to, a.terms.mask_bytes, shared.mask_start + warp * kRowsOfWarp * stride + tile * kKeys * a.terms.mask_bytes,
          stride);
    }
  load_mask_tile<32, kRowsOfWarp, kKeys>(to, static_cast<int>(threadIdx.x) % 32, a.terms, shared.q_tile.batch,
                                         shared.q_tile.head, warp_row(), shared.q_tile.q_tokens, tile * kKeys,
                                         shared.q_tile.k_tokens);
}

// Returns true if a maximum of any thread of the warp is NaN.
template <int Blocks>
__device__ inline bool any_is_nan(const RowValues (&most)[Blocks]) {
  bool any = false;
#pragma unroll
  for (const RowValues& each : most) any |= isnan(each[0]) || isnan(each[1]);
  return __any_sync(~0u, any);
}

// Returns true if P over the stale maximum are at most 1, or at most a quarter of the sum so far, for logits up to
// `most` of this thread: a row that a mask leaves few keys has nothing else that would hide the rounding error of a
// large P.
template <class Kind>
__device__ inline bool Forward<Kind>::fits_beside_sum(const Softmax& softmax, const RowValues& most) {
  constexpr float kOne = static_cast<float>(1 << kExponent), kMost = 0x1p15f;  // the largest P in f16
  bool fits = true;
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    const float origin = softmax.template origin<kExponent>(row, softmax.m[row]);
    const float p = ptx::exp2(__fmaf_rn(most[row], softmax.scale_log2[row], -origin));
    fits &= p <= fminf(fmaxf(softmax.l[row] / 4.f, kOne), kMost);
  }
  return fits;
}

// Turns products into logits, and those of unseen keys into -inf.
template <class Kind>
__device__ inline void Forward<Kind>::take_logits(S& s, int tile, const bool& zeros) const {
  const Interval all = warp_tiles().all;
  const int key = first_key_of_warp(tile);
  const bool masked = key < all.first || key + kWarpKeys > all.last;
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block) {
    const int first = ptx::opaque(thread_row(block));
    if constexpr (kMasked) {
      const float row_bias[] = {row_bias_of(first), row_bias_of(first + 8)};
      if (zeros)
        subtract_row_bias(s[block], a.terms.scale, row_bias);
      else
        mask_of(block).add(s[block], a.terms.scale, row_bias);
    } else if constexpr (kGeneral) {
      const bool capped = a.terms.softcap != 0.f;
      if (capped)
#pragma unroll
        for (float& x : s[block].x) x = softcap(a.terms, x * a.terms.scale).x;
      const float scale = capped ? 1.f : a.terms.scale;
      if (stages_mask() && !a.terms.slopes) {
        mask_of(block).add(s[block], scale, {row_bias_of(first), row_bias_of(first + 8)});
        mask_of(block).hide(s[block]);
      } else {
        const RowTerms terms[] = {terms_of(first), terms_of(first + 8)};
        add_terms(s[block], scale, a.terms, terms, key, shared.q_tile.k_tokens);
      }
    }
    if (!masked) continue;
    const Interval ranges[] = {range_of(first), range_of(first + 8)};
    mask_rows(s[block], key, ranges);
  }
}

// Finds the largest logits of this thread's rows. Returns whether P over the stale maximum would fit.
template <class Kind>
__device__ inline bool Forward<Kind>::fits_stale_max(const S& s, const Softmax (&softmax)[kRowBlocks],
                                                     RowValues (&most)[kRowBlocks]) {
  constexpr float kMost = kMaxPLog2<Precision, Tile, Kind::kLogits>;
  bool fits = true;
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block) {
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row)
      most[block][row] = kMasked ? row_max_or_nan(s[block], row) : row_max(s[block], row, -INFINITY);
    if constexpr (kMasked)
      fits &= fits_beside_sum(softmax[block], most[block]);
    else
      fits &= softmax[block].template fits_stale_max<kExponent>(most[block], kMost);
  }
  return __all_sync(~0u, fits) != 0;
}

// Takes the elements that dropout drops from P, whose sums keep them.
template <class Kind>
__device__ inline void Forward<Kind>::drop_from(P& p, int tile) const {
  if (!a.dropout.seed) return;
  KeptElements<kKeys, RowTokens::queries> kept[kRowBlocks];
  find_kept(kept, a.dropout.stream(shared.q_tile.sequence, shared.q_tile.head), a.dropout.dropped,
            ptx::opaque(thread_row(0)), tile * kKeys);
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block) Operands::drop_from(p, block, kept[block]);
}

// Turns logits into P. The maximum is that of earlier tiles, unless P would be too large.
template <class Kind>
__device__ inline void Forward<Kind>::take_exp(S& s, int tile, const bool& zeros, Softmax (&softmax)[kRowBlocks], O& o,
                                               P& p) const {
  if constexpr (kGeneral)
    if (a.beta != 0.f) {
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) {
        scale_rows(o[block], softmax[block].template exp_update_max<kExponent>(s[block]));
        Operands::convert(*this, s[block], block, tile, p);
      }
      return;
    }
  RowValues most[kRowBlocks];
  bool fits = fits_stale_max(s, softmax, most);
  // A key that the mask hides has a logit of -inf, or NaN where its product is not finite.
  if constexpr (kMasked)
    if (!fits && !zeros && any_is_nan(most)) {
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) mask_of(block).hide(s[block]);
      fits = fits_stale_max(s, softmax, most);
    }
  if (!fits)
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block)
      scale_rows(o[block], softmax[block].template update_max<kExponent>(most[block]));
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block)
    softmax[block].template exp_and_sum<kExponent>(s[block]), Operands::convert(*this, s[block], block, tile, p);
}

// Turns logits into P without a look at the maximum. Returns false, with the products spoilt, where P are too large.
template <class Kind>
__device__ inline bool Forward<Kind>::take_exp_of_stale_max(S& s, Softmax (&softmax)[kRowBlocks]) {
  constexpr float kMost = max_p<Precision, Tile>();
  RowValues sum[kRowBlocks];
  bool fits = true;
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block) {
    sum[block] = softmax[block].template exp_stale_max<kExponent>(s[block]);
    fits &= sum[block][0] <= kMost && sum[block][1] <= kMost;
  }
  if (!__all_sync(~0u, fits)) return false;
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block)
    softmax[block].l[0] += sum[block][0], softmax[block].l[1] += sum[block][1];
  return true;
}

// Finds what the keys of a sequence have in common.
template <class Kind>
__device__ inline void Forward<Kind>::start_sequence() const {
  const int kv_head = shared.q_tile.head / a.group;
  shared.seen = a.mask.seen(shared.q_tile.q_tokens, shared.q_tile.k_tokens);
  shared.k_start = a.k.row<KType>(first_page(), kv_head, Operands::first_key(*this));
  shared.v_start = Operands::start_v(*this, kv_head);
  if constexpr (kMasked)
    shared.mask_start = a.terms.mask_at(shared.q_tile.batch, shared.q_tile.head, shared.q_tile.q_start, 0);
  Operands::start_factors(*this, kv_head);
}

// Sets o and the sums of all rows to those of no keys.
template <class Kind>
__device__ inline void Forward<Kind>::start_rows(Softmax (&softmax)[kRowBlocks], O& o) const {
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block) {
    o[block].zero();
    softmax[block] = Operands::start_softmax(*this, block);
  }
}

// Computes the tile of queries of this thread block.
template <class Kind>
__device__ inline void Forward<Kind>::run() const {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const SeenTiles& tiles = shared.warp_tiles[warp];
  if (!start()) return;
  int tile = shared.tiles.last - 1;
  Sources sources = sources_of(tile);
  int page = page_of_lane(tile), page_of_late_v = page;
  if (shared.tiles.first <= tile) load_keys(tile, sources, page);
  page = page_of_lane(tile - 1);
  ptx::cp_async_commit();
  constexpr int kAhead = Tile::kStages - 1;  // tiles that are loaded ahead
  const auto load_after = [&](int last) {    // the tile after the last one that has been asked for
    if constexpr (kKeepsSources) sources.k -= kKeys * a.k.stride[2], sources.v -= kKeys * a.v.stride[2];
    if (last > shared.tiles.first) load_keys(last - 1, kKeepsSources ? sources : sources_of(last - 1), page);
    ptx::cp_async_commit();
    page = page_of_lane(last - 2);
  };
#pragma unroll
  for (int ahead = 1; ahead < kAhead; ++ahead) load_after(tile - ahead + 1);
  // True if the mask is 0 in the tile that is computed next.
  bool zeros = kMasked && tiles.first < tiles.last && has_zeros(tiles.last - 1);
  if constexpr (Tile::kStagesMask) load_mask(tiles.last - 1, zeros), ptx::cp_async_commit();

  // A q that is converted waits for memory; by now the first tiles are on their way.
  if constexpr (Operands::kConvertsQ) Operands::load_q_factors(*this), __syncthreads();
  Softmax softmax[kRowBlocks];
  O o;
  start_rows(softmax, o);
  QRows q_rows;
  if constexpr (Tile::kQRegisters) {
    ptx::cp_async_wait<kAhead + kMaskGroups>();
    __syncthreads();
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block)
      load_rows(q_rows[block], q(), warp / kSharers * kRowBlocks + block, channel_part() * kSteps);
  }
#pragma unroll 1
  for (; tile >= shared.tiles.first; --tile) {
    ptx::cp_async_wait<kAhead - 1 + kMaskGroups>();
    __syncthreads();  // the tile has arrived, and the one before it has been read
    if constexpr (Tile::kLateV) {
      load_late_v(tile, page_of_late_v);
      page_of_late_v = page;
    }
    load_after(tile - kAhead + 1);
    if (tile < tiles.first || tile >= tiles.last) {
      if constexpr (Tile::kStagesMask) ptx::cp_async_commit();
      wait_late_v();
      continue;
    }
    // Asked for long before it is needed.
    const bool next_zeros = kMasked && has_zeros(tile - 1);
    S s;
    Operands::multiply_qk(*this, q_rows, s, tile);
    // The tile of the mask has arrived.
    if constexpr (Tile::kStagesMask) ptx::cp_async_wait<Tile::kLateV ? 2 : 1>(), __syncwarp();
    take_logits(s, tile, zeros);
    P p;
    const auto shift = Operands::shift_max(*this, softmax, tile);
    if constexpr (Tile::kRepeats) {
      const bool first = tile == tiles.last - 1;
      if (first || !take_exp_of_stale_max(s, softmax)) {
        if (!first) {
          Operands::multiply_qk(*this, q_rows, s, ptx::opaque(tile));
          take_logits(s, ptx::opaque(tile), zeros);
        }
#pragma unroll
        for (int block = 0; block < kRowBlocks; ++block)
          scale_rows(o[block], softmax[block].template exp_update_max<kExponent>(s[block]));
      }
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) Operands::convert(*this, s[block], block, tile, p);
    } else {
      Operands::take_exp(*this, s, tile, zeros, softmax, o, p);
    }
    Operands::unshift_max(shift, softmax);
    if constexpr (kDrops) drop_from(p, tile);
    if constexpr (Tile::kStagesMask) __syncwarp(), load_mask(tile - 1, next_zeros), ptx::cp_async_commit();
    zeros = next_zeros;
    wait_late_v();
    Operands::multiply_pv(*this, p, tile, o);
    if constexpr (kCompensated<Precision>)
      if (flips_after(tile)) flip(softmax, o);
  }
  ptx::cp_async_wait<0>();
  if constexpr (kCompensated<Precision>)
    if (tiles.last - tiles.first > 1) unflip(softmax, o);
  if constexpr (kKeyWarps > 1)
    if (!join_key_warps(softmax, o)) return;
  Operands::order_channels(o);
  write(softmax, o);
}

}  // namespace octet::cuda::sm80
