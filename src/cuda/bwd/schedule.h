// Chooses the block of keys that a thread block works on next, the tiles of queries that see the block, and the order
// in which it visits them. Blocks that run at the same time should add to different tiles of dq. With a positional mask
// their first tiles differ. Without one, each block starts at another tile and wraps around.
#pragma once
#include <cstddef>

#include "cuda/bwd/params.h"

namespace octet::cuda {

// Tiles [first, last) of queries, visited from `start` on, wrapping around at `last`.
struct Tiles {
  int first, last, start;

  __device__ int count() const { return last - first; }
};

struct KeyBlockInfo {
  int batch, kv_head, block;  // `block` within the head; -1: no block is left
  int first_key;              // within the sequence
  Blocks::Sequence q, k;
  Tiles tiles;
  KeyExponents exponents;
  int16_t bin;  // of the queries; unused where a kernel computes the first bin alone

  __device__ bool valid() const { return block >= 0; }
};

// A tile of queries and a head of the group. All heads of a tile come before the next tile.
struct MBlock {
  int tile, head;

  __device__ void advance(const Tiles& tiles, int group) {
    if (++head < group) return;
    head = 0;
    if (++tile == tiles.last) tile = tiles.first;
  }
};

template <int kQueries, int kKeys, Bins bins = Bins::first>
struct KeyBlockScheduler {
  const BackwardParams& a;

  // Finds the block of keys with a number. Blocks come in ascending order, as the first is the longest under a causal
  // mask. `w` is filled in place: it lies in shared memory, and the producer has few registers.
  __device__ void find(unsigned number, KeyBlockInfo& w) const {
    const unsigned blocks = a.k_blocks.count, all = bins == Bins::first ? a.batch * a.kv_heads : a.divided[0];
    w.block = -1;
    if (number >= blocks * all) return;
    auto [head, block] = a.head_groups.tile_of(number, blocks, all);
    if (bins == Bins::further) head = a.divided[1 + head], w.bin = 1;
    w.batch = static_cast<int>(head / a.kv_heads), w.kv_head = static_cast<int>(head % a.kv_heads);
    w.block = static_cast<int>(block);
    w.k = a.k_blocks.sequence_of(w.block);
    if (w.k.index < 0) return;
    w.first_key = (w.block - w.k.first_block) * kKeys;
    w.q = a.q_blocks.cu_seqlens ? a.q_blocks.sequence(w.k.index) : a.q_blocks.sequence_of(0);
    w.tiles = tiles_of(w);
  }

  __device__ const Exponents& exponents(const KeyBlockInfo& w) const {
    const int head = w.batch * a.kv_heads + w.kv_head;
    return a.exponents[bins == Bins::first ? head : w.bin * (a.batch * a.kv_heads) + head];
  }

  // Returns true if the block has one more bin of queries; then `w` is the block for that bin. The same thread block
  // takes it, as each bin adds to the dk and dv that the bins before have written.
  __device__ bool next_bin(const KeyBlockInfo& last, KeyBlockInfo& w) const {
    if (last.bin + 1 >= exponents(last).bins) return false;
    const auto* const from = reinterpret_cast<const int*>(&last);
    auto* const to = reinterpret_cast<int*>(&w);
    // Not the exponents, which the converters of `last` may be writing. A loop, as the producer has few registers.
#pragma unroll 1
    for (unsigned i = 0; i < offsetof(KeyBlockInfo, exponents) / sizeof *to; ++i) to[i] = from[i];
    w.bin = static_cast<int16_t>(last.bin + 1);
    return true;
  }

  __device__ Tiles tiles_of(const KeyBlockInfo& w) const {
    const int all = (w.q.tokens + kQueries - 1) / kQueries;
    if (!a.mask.windowed) {
      const int blocks = (w.k.tokens + kKeys - 1) / kKeys;
      const float fraction = static_cast<float>(w.block - w.k.first_block) / static_cast<float>(blocks);
      return {0, all, min(static_cast<int>(fraction * static_cast<float>(all)), all - 1)};
    }
    const int end = min(w.first_key + kKeys, w.k.tokens);
    const Interval seen = a.mask.queries_of_all(w.first_key, end, w.q.tokens, w.k.tokens).any.tiles(kQueries);
    return {seen.first, max(seen.first, seen.last), seen.first};
  }

  // Returns the QueryRows of a tile for the block's bin, which is loaded each time, as producers have few registers.
  template <class Rows>
  __device__ const unsigned char* rows(const KeyBlockInfo& w, int64_t tile) const {
    if (bins == Bins::first) return a.rows + tile * sizeof(Rows);
    const unsigned bin = *static_cast<const volatile int16_t*>(&w.bin);
    return a.rows + (static_cast<unsigned>(tile) + bin * a.q_tiles()) * static_cast<int64_t>(sizeof(Rows));
  }
  // Returns the number of a tile of queries among those of all heads.
  __device__ int64_t q_tile(const KeyBlockInfo& w, const MBlock& at, int group) const {
    const int64_t head = static_cast<int64_t>(w.batch * a.kv_heads + w.kv_head) * group + at.head;
    return head * a.q_blocks.count + w.q.first_block + at.tile;
  }
};

}  // namespace octet::cuda
