// The sums of dq over blocks of keys, which are added by atomics in L2: where they go, how they are set to 0, and
// additions to them.
#pragma once
#include <cstring>
#include <cuda/atomic>
#include <type_traits>

#include "cuda/bwd/schedule.h"
#include "cuda/fragment/accumulator.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90/bwd/config.h"

namespace octet::cuda::sm90 {

// The sums that dq of an iteration is added to: its tile of queries and, where sums are integers, the scales of this
// thread's rows.
struct Target {
  int tile;
  float scales[kRowsPerThread];
};

// `first` is the query of the fragment's first row, within the tile.
template <Sums sums, class Rows>
__device__ Target target_of(const Rows& rows, int first, float dq_sums_scale) {
  Target target{rows.tile};
  if constexpr (sums == Sums::integers)
    for (int half = 0; half < kRowsPerThread; ++half)
      target.scales[half] = dq_scale_of(rows.dq_row_scale[first + fragment_row() + 8 * half], dq_sums_scale);
  return target;
}

// Sums of dq that are not 0 from the start are cleared by idle warps, so that they are in L2 when they are added to:
// with each block of keys, a share of the sums of a later head, of `shares` for each head. This function waits until
// all sums of this block's head are 0. It cannot deadlock, as the blocks that clear them were taken before this one.
__device__ inline void await_zeros(const BackwardParams& a, const KeyBlockInfo& w, int shares) {
  const int head = w.batch * a.kv_heads + w.kv_head;
  if (head < a.zeroed_heads) return;
  const ::cuda::atomic_ref<unsigned, ::cuda::thread_scope_device> zeroed(a.zeroed[head]);
  while (zeroed.load(::cuda::memory_order_acquire) < shares) __nanosleep(100);
}
// Clears this block's share. A tile of queries has `tile_numbers` sums of four bytes.
template <int tile_numbers, int threads>
__device__ void clear_ahead(const BackwardParams& a, const KeyBlockInfo& w, int share, int shares, int thread,
                            int barrier) {
  const int head = w.batch * a.kv_heads + w.kv_head + a.zeroed_heads;
  if (head >= a.batch * a.kv_heads) return;
  const int64_t words =
      static_cast<int64_t>(a.heads / a.kv_heads) * a.q_blocks.count * (tile_numbers / 4);  // of a head
  const int64_t size = (words + shares - 1) / shares;
  uint4* at = static_cast<uint4*>(a.dq) + head * words + share * size;
  const uint4* const end = at + min(words - share * size, size);
  for (at += thread; at < end; at += threads) *at = {};
  ptx::barrier_sync(barrier, threads);
  if (thread > 0) return;
  const ::cuda::atomic_ref<unsigned, ::cuda::thread_scope_device> zeroed(a.zeroed[head]);
  zeroed.fetch_add(1, ::cuda::memory_order_release);
}

// Adds columns [from, columns) of a fragment to the sums of dq, which begin at number `start`. The fragment's first row
// is query `first` of the tile. The `at_once` numbers that a thread adds with one instruction are contiguous, followed
// by those of the next thread.
template <class Rows, Sums sums, int at_once, int Columns>
__device__ void add_to_sums(const BackwardParams& a, const Target& target, int64_t start, int first,
                            const Accumulator<Columns>& x, int columns, int thread, int from = 0) {
  if constexpr (sums == Sums::floats) {
    using Numbers = std::conditional_t<at_once == 4, float4, std::conditional_t<at_once == 2, float2, float>>;
    auto* const to = reinterpret_cast<Numbers*>(static_cast<float*>(a.dq) + start) + thread;
#pragma unroll
    for (int i = 0; i < Columns / 2; i += at_once) {
      if (i / 4 * 8 < from) continue;
      if (i / 4 * 8 >= columns) break;
      Numbers numbers;
      memcpy(&numbers, &x.x[i], sizeof(numbers));
      atomicAdd(to + i / at_once * kWarpgroup, numbers);
    }
  } else {
    static_assert(at_once == 1);
#pragma unroll
    for (int half = 0; half < kRowsPerThread; ++half) {
      // An inf or NaN comes from ds and is in every column. It makes the row's scale NaN, and thereby the row.
      if (!isfinite(x.x[2 * half]))
        reinterpret_cast<Rows*>(a.rows)[target.tile].dq_row_scale[first + fragment_row() + 8 * half] =
            __int_as_float(0x7fffffff);
#pragma unroll
      for (int i = 0; i < Columns / 2; ++i)
        if (i / 2 % 2 == half && i / 4 * 8 >= from && i / 4 * 8 < columns)
          atomicAdd(static_cast<int*>(a.dq) + start + i * kWarpgroup + thread,
                    __float2int_rn(x.x[i] * target.scales[half]));
    }
  }
}

}  // namespace octet::cuda::sm90
