// Head dims above 256 (forward.h): what warps do that share the channels of their rows, and the mainloop of tiles of
// queries, which have one stage of k and one of v.
#pragma once
#include "cuda/sm80/fwd/mainloop.h"

namespace octet::cuda::sm80 {

// Sets s to this warp's part of q k^T: the products of its channels.
template <class Kind>
__device__ inline void Forward<Kind>::multiply_part(const QRows& q_rows, S& s, int tile) const {
#pragma unroll
  for (auto& each : s) each.zero();
  const int first = channel_part() * kSteps;
  if constexpr (Tile::kQRegisters)
    mma_ABt(s, q_rows, k(tile), 0, 0, first);
  else
    mma_ABt<kChannels>(s, q(), static_cast<int>(threadIdx.x) / (32 * kSharers) * kRowBlocks, k(tile), 0, 0, first);
}

// Returns where this thread's numbers of the part of warp `warp` lie, four of each lane side by side.
template <class Kind>
__device__ inline float* Forward<Kind>::parts(int warp) const {
  static_assert(kPartNumbers % 4 == 0 && sizeof(float) * kThreads * kPartNumbers <= sizeof(shared.k) * Tile::kStages);
  float* const all = Tile::kStages == 1 ? reinterpret_cast<float*>(shared.k) : shared.parts;
  return all + warp * (32 * kPartNumbers) + ptx::opaque(static_cast<int>(threadIdx.x)) % 32 * 4;
}

// Writes this warp's part of s for those that share its rows.
template <class Kind>
__device__ inline void Forward<Kind>::put_part(const S& s) const {
  float* const to = parts(ptx::opaque(static_cast<int>(threadIdx.x)) / 32);
#pragma unroll
  for (int i = 0; i < kPartNumbers; i += 4) {
    const float* const x = &s[i / (kWarpKeys / 2)].x[i % (kWarpKeys / 2)];
    *reinterpret_cast<float4*>(to + 32 * i) = {x[0], x[1], x[2], x[3]};
  }
}

// Sets s to the sum of its parts, which all warps add in the same order.
template <class Kind>
__device__ inline void Forward<Kind>::add_parts(S& s) const {
  const float* const from = parts(ptx::opaque(static_cast<int>(threadIdx.x)) / 32 / kChannelWarps * kChannelWarps);
#pragma unroll
  for (int i = 0; i < kPartNumbers; i += 4) {
    float* const x = &s[i / (kWarpKeys / 2)].x[i % (kWarpKeys / 2)];
#pragma unroll
    for (int part = 0; part < kChannelWarps; ++part) {
      const float4 y = *reinterpret_cast<const float4*>(from + (part * kPartNumbers + i) * 32);
      x[0] = part ? x[0] + y.x : y.x, x[1] = part ? x[1] + y.y : y.y;
      x[2] = part ? x[2] + y.z : y.z, x[3] = part ? x[3] + y.w : y.w;
    }
  }
}

// s = q k^T, where all warps share the rows of the tile. The next parts are written after the barrier of the next tile.
template <class Kind>
__device__ inline void Forward<Kind>::multiply_qk_by_channels(const QRows& q_rows, S& s, int tile) const {
  static_assert(Tile::kStages == 1 || kSharers == Tile::kWarps);
  multiply_part(q_rows, s, tile);
  put_part(s);
  __syncthreads();
  add_parts(s);
}

// Computes the tile of queries of this thread block, where k and v have one stage: v of a tile is loaded while q k^T is
// computed, and k of the next one while p v is.
template <class Kind>
__device__ inline void Forward<Kind>::run_wide() const {
  static_assert(Tile::kStages == 1 && Tile::kLateV && !Tile::kQRegisters && !Tile::kStagesMask && !kPairs);
  const SeenTiles& tiles = shared.warp_tiles[static_cast<int>(threadIdx.x) / 32];
  if (!start()) return;
  int tile = shared.tiles.last - 1;
  if (shared.tiles.first <= tile) load_keys(tile, sources_of(tile), 0);
  ptx::cp_async_commit();
  Softmax softmax[kRowBlocks];
  O o;
  start_rows(softmax, o);
  QRows q_rows;  // not in registers
#pragma unroll 1
  for (; tile >= shared.tiles.first; --tile) {
    const bool seen = tile >= tiles.first && tile < tiles.last;
    ptx::cp_async_wait<0>();
    __syncthreads();  // k has arrived, and v of the tile before it has been read
    load_late_v(tile, 0);
    S s;
    if (seen) multiply_part(q_rows, s, tile);
    __syncthreads();  // k has been read
    if (seen) put_part(s);
    __syncthreads();  // the parts of s are there
    if (seen) add_parts(s);
    ptx::cp_async_wait<0>();
    __syncthreads();  // they have been read, and v has arrived
    if (tile > shared.tiles.first) load_keys(tile - 1, sources_of(tile - 1), 0);
    ptx::cp_async_commit();
    if (!seen) continue;
    take_logits(s, tile, false);
    P p;
    Operands::take_exp(*this, s, tile, false, softmax, o, p);
    if constexpr (kDrops) drop_from(p, tile);
    Operands::multiply_pv(*this, p, tile, o);
    if constexpr (kCompensated<Precision>)
      if (flips_after(tile)) flip(softmax, o);
  }
  ptx::cp_async_wait<0>();
  if constexpr (kCompensated<Precision>)
    if (tiles.last - tiles.first > 1) unflip(softmax, o);
  write(softmax, o);
}

}  // namespace octet::cuda::sm80
