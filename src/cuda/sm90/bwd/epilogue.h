// What the backward kernels share: P of pairs that see each other, sums of dq, dk and dv on their way out.
#pragma once
#include <cstring>
#include <cuda/atomic>
#include <type_traits>

#include "cuda/sm90/bwd/params.h"
#include "cuda/sm90/bwd/schedule.h"
#include "cuda/sm90/bwd/config.h"
#include "cuda/sm90/mma.h"
#include "cuda/sm90/pipeline.h"
#include "cuda/sm90/smem.h"

namespace octet::cuda::sm90 {

// One number for each column of a fragment that a thread holds.
template <int Columns>
struct ColumnValues {
  float2 x[Columns / 8];
  __device__ explicit ColumnValues(const float* from) { read(from); }
  __device__ void read(const float* from) {
#pragma unroll
    for (int i = 0; i < Columns / 8; ++i) x[i] = *reinterpret_cast<const float2*>(from + 8 * i + fragment_column());
  }
  __device__ float of(int element) const { return element % 2 ? x[element / 4].y : x[element / 4].x; }
};

// Starts to copy a prepared tile, or a part of it, to shared memory; `full` counts its bytes.
__device__ inline void fetch(void* to, const void* from, uint32_t bytes, Barrier& full) {
  namespace ptx = ::cuda::ptx;
  ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, to, from, bytes, &full.word);
}

// All lanes of a warp are done with what a barrier guards.
__device__ inline void arrive_as_warp(Barrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier.arrive();
}

// Columns [channel, channel + Columns) of a tile, a multiple of 64.
template <int Columns, class TileX>
__device__ SharedTile<typename TileX::Element, TileX::kRows, Columns, TileX::kInCluster> columns_of(const TileX& x,
                                                                                                    int channel) {
  return {x.data + channel / kPanelColumns * TileX::kPanelBytes};
}

// The steps of a block in which all of so many queries see all of `keys` from `key`, by how many are left. Only tiles
// of a mask by position are visited from the first on; without one all tiles see the same keys.
struct UnmaskedSteps {
  int most, least;
  __device__ UnmaskedSteps(const BackwardParams& a, const KeyBlockInfo& w, int key, int keys, int queries, int group)
      : most(w.tiles.count() * group), least(0) {
    if (a.mask.windowed) {
      const int shift = a.mask.bottom_right ? w.k.tokens - w.q.tokens : 0;
      const int first = (max(key + keys - 1 - shift - a.mask.right, 0) + queries - 1) / queries;
      const int last = (key - shift + a.mask.left + 1) / queries;
      most = (w.tiles.last - max(first, w.tiles.first)) * group,
      least = (w.tiles.last - min(last, w.tiles.last)) * group;
    }
    if (key + keys > w.k.tokens) least = most;
  }
  __device__ bool has(int left) const { return least < left && left <= most; }
};

// p of pairs that do not see each other becomes 0. Rows are keys from `key`, columns queries from `query`.
template <int Columns>
__device__ void mask_P(const BackwardParams& a, Accumulator<Columns>& p, const KeyBlockInfo& w, int key,
                             int query) {
  const int shift = a.mask.bottom_right ? w.k.tokens - w.q.tokens : 0;
  const int left = a.mask.windowed ? a.mask.left : Mask::kUnbounded;
  const int right = a.mask.windowed ? a.mask.right : Mask::kUnbounded;
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    const int j = key + fragment_row() + 8 * row;
    const int distance = j - shift - query - fragment_column() + left;  // of the fragment's column 0
#pragma unroll
    for (int i = 0; i < Columns / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (j >= w.k.tokens || static_cast<unsigned>(distance - 8 * i - c) > static_cast<unsigned>(left + right))
          p.x[4 * i + 2 * row + c] = 0.f;
  }
}

// Where dq of a step goes: its tile of queries, and what integers in this thread's rows are sums of.
struct Target {
  int tile;
  float units[kRowsPerThread];
};

// `first`: the query of the fragment's first row within the tile.
template <Sums sums, class Rows>
__device__ Target target_of(const Rows& rows, int first, float dq_sums_unit) {
  Target target{rows.tile};
  if constexpr (sums == Sums::integers)
    for (int half = 0; half < kRowsPerThread; ++half)
      target.units[half] = unit_of_sums(rows.dq_unit[first + fragment_row() + 8 * half], dq_sums_unit);
  return target;
}

// Sums of dq that are not 0 from the start are cleared by idle warps, so that they are in L2 when they are added to:
// with each block of keys a share of those of a later head, `shares` for each head. Until all of this block's head are
// 0; what clears them are blocks drawn before this one.
__device__ inline void await_zeros(const BackwardParams& a, const KeyBlockInfo& w, int shares) {
  const int head = w.batch * a.kv_heads + w.kv_head;
  if (head < a.zeroed_heads) return;
  const ::cuda::atomic_ref<unsigned, ::cuda::thread_scope_device> zeroed(a.zeroed[head]);
  while (zeroed.load(::cuda::memory_order_acquire) < shares) __nanosleep(100);
}
// Clears this block's share, once for all parts of the queries: numbers of four bytes, of which a tile of queries has
// `of_tile`.
template <int of_tile, int threads>
__device__ void clear_ahead(const BackwardParams& a, const KeyBlockInfo& w, int share, int shares, int thread,
                            int barrier) {
  if (w.part > 0) return;
  const int head = w.batch * a.kv_heads + w.kv_head + a.zeroed_heads;
  if (head >= a.batch * a.kv_heads) return;
  const int64_t words = static_cast<int64_t>(a.heads / a.kv_heads) * a.q_blocks.count * (of_tile / 4);  // of a head
  const int64_t size = (words + shares - 1) / shares;
  uint4* at = static_cast<uint4*>(a.dq) + head * words + share * size;
  const uint4* const end = at + min(words - share * size, size);
  for (at += thread; at < end; at += threads) *at = {};
  ptx::barrier_sync(barrier, threads);
  if (thread > 0) return;
  const ::cuda::atomic_ref<unsigned, ::cuda::thread_scope_device> zeroed(a.zeroed[head]);
  zeroed.fetch_add(1, ::cuda::memory_order_release);
}

// Adds a fragment to the sums of dq, of which it is numbers from `start`; its first row is query `first` of the tile.
// Numbers that a thread adds at once lie together, then those of the next of the warpgroup's threads.
template <class Rows, Sums sums, int at_once, int Columns>
__device__ void add_to_sums(const BackwardParams& a, const Target& target, int64_t start, int first,
                            const Accumulator<Columns>& x, int thread) {
  if constexpr (sums == Sums::floats) {
    using Numbers = std::conditional_t<at_once == 4, float4, std::conditional_t<at_once == 2, float2, float>>;
    auto* const to = reinterpret_cast<Numbers*>(static_cast<float*>(a.dq) + start) + thread;
#pragma unroll
    for (int i = 0; i < Columns / 2; i += at_once) {
      Numbers numbers;
      memcpy(&numbers, &x.x[i], sizeof(numbers));
      atomicAdd(to + i / at_once * kWarpgroup, numbers);
    }
  } else {
    static_assert(at_once == 1);
#pragma unroll
    for (int half = 0; half < kRowsPerThread; ++half) {
      // An inf or NaN comes from ds and is in every column. It takes the unit away, and so turns the row into NaN.
      if (!isfinite(x.x[2 * half]))
        reinterpret_cast<Rows*>(a.rows)[target.tile].dq_unit[first + fragment_row() + 8 * half] =
            __int_as_float(0x7fffffff);
#pragma unroll
      for (int i = 0; i < Columns / 2; ++i)
        if (i / 2 % 2 == half)
          atomicAdd(static_cast<int*>(a.dq) + start + i * kWarpgroup + thread,
                    __float2int_rn(x.x[i] * target.units[half]));
    }
  }
}

template <class Type, int Columns>
__device__ void write_keys_as(const Output& out, const KeyBlockInfo& w, int key, int channel,
                              const Accumulator<Columns>& x, int columns) {
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    const int j = key + fragment_row() + 8 * row;
    store_row<Type, CachePolicy::evict_first>(out.row<Type>(w.batch, w.kv_head, static_cast<int64_t>(w.k.first) + j) + channel,
                                       j < w.k.tokens, x, row, columns - channel);
  }
}

template <class Type, int Columns>
__device__ void add_keys_as(const Output& out, const KeyBlockInfo& w, int first_key, int channel,
                            Accumulator<Columns>& x, int columns) {
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    const int key = first_key + fragment_row() + 8 * row;
    const Type* const from = out.row<Type>(w.batch, w.kv_head, static_cast<int64_t>(w.k.first) + key) + channel;
    if (key >= w.k.tokens) continue;
#pragma unroll
    for (int i = 0; i < Columns / 8; ++i) {
      if (8 * i >= columns - channel) continue;
      struct alignas(2 * sizeof(Type)) {
        Type numbers[2];
      } pair;
      memcpy(&pair, from + 8 * i + fragment_column(), sizeof pair);
      x.x[4 * i + 2 * row] += float(pair.numbers[0]), x.x[4 * i + 2 * row + 1] += float(pair.numbers[1]);
    }
  }
}

template <int Columns>
__device__ void add_keys(const Output& out, const KeyBlockInfo& w, int key, int channel, Accumulator<Columns>& x,
                         int columns) {
  switch (out.element) {
    case Element::f32:
      return add_keys_as<float>(out, w, key, channel, x, columns);
    case Element::f16:
      return add_keys_as<F16>(out, w, key, channel, x, columns);
    default:
      return add_keys_as<Bf16>(out, w, key, channel, x, columns);
  }
}

// x scale 2^exponent, in two steps as the exponent alone may not be a float, to rows from `key`, columns from `channel`,
// beside what earlier parts of the queries have left there.
template <int Columns>
__device__ void write_keys(const Output& out, const KeyBlockInfo& w, int key, int channel, Accumulator<Columns>& x,
                           float scale, int exponent, int columns) {
  const float first = scale * exp2f(static_cast<float>(exponent / 2)),
              second = exp2f(static_cast<float>(exponent - exponent / 2));
#pragma unroll
  for (int i = 0; i < Columns / 2; ++i) x.x[i] = x.x[i] * first * second;
  // opaque() stops hoisting: the loop would compute addresses in each step that it has in registers.
  const KeyBlockInfo& same = *ptx::opaque(&w);
  if (same.part > 0) add_keys(out, same, ptx::opaque(key), channel, x, columns);
  switch (out.element) {
    case Element::f32:
      return write_keys_as<float>(out, w, key, channel, x, columns);
    case Element::f16:
      return write_keys_as<F16>(out, w, key, channel, x, columns);
    default:
      return write_keys_as<Bf16>(out, w, key, channel, x, columns);
  }
}

}  // namespace octet::cuda::sm90
