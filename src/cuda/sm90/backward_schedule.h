// Which block of keys a thread block takes next, the tiles of queries that the block sees, and the order in which it
// visits them.
//
// Blocks of a cohort run at the same time, each at another tile: under a mask by position their first tiles differ,
// and without one each starts at another tile and goes around. When dq is summed in a fixed order, blocks add to a tile
// cohort by cohort, and within a cohort in the order in which they come to it, so a block hardly ever waits. It never
// waits for ever, provided that all of a cohort run at once (BackwardArguments::cohort): of all blocks, the one that
// has taken the fewest steps (the last of them, if several have) waits for no other.
#pragma once
#include "cuda/sm90/backward_arguments.h"

namespace octet::cuda::sm90 {

// Tiles [first, last) of queries, visited from `start` on and around.
struct Tiles {
  int first, last, start;

  __device__ int count() const { return last - first; }
};

struct BackwardWork {
  int batch, kv_head, block;  // block: of the head, -1: nothing is left
  int first_key;              // within the sequence
  Blocks::Sequence q, k;
  Tiles tiles;
};

// A head of the group and a tile of queries.
struct Visit {
  int head, tile;

  __device__ void advance(const Tiles& tiles) {
    if (++tile == tiles.last) tile = tiles.first;
    if (tile == tiles.start) ++head;
  }
};

template <int kQueries, int kKeys>
struct BackwardSchedule {
  const BackwardArguments& a;

  // Blocks of keys in ascending order, across the kv heads of a section: under a causal mask the first is the longest.
  __device__ BackwardWork work_at(unsigned number) const {
    const unsigned blocks = a.k_blocks.count, all = a.batch * a.kv_heads;
    if (number >= blocks * all) return {.block = -1};
    const unsigned first_head = number / (blocks * a.section) * a.section;
    const unsigned width = min(static_cast<unsigned>(a.section), all - first_head);
    const unsigned rest = number - first_head * blocks, head = first_head + rest % width;
    BackwardWork w{static_cast<int>(head / a.kv_heads), static_cast<int>(head % a.kv_heads),
                   static_cast<int>(rest / width)};
    w.k = a.k_blocks.sequence_of(w.block);
    if (w.k.index < 0) return w;
    w.first_key = (w.block - w.k.first_block) * kKeys;
    w.q = a.q_blocks.cu_seqlens ? a.q_blocks.sequence(w.k.index) : a.q_blocks.sequence_of(0);
    w.tiles = tiles_of(w);
    return w;
  }

  // Blocks [first, last) of w's sequence and cohort.
  struct Cohort {
    int first, last;
  };
  __device__ Cohort cohort_of(const BackwardWork& w) const {
    const int first = w.block / a.cohort * a.cohort, end = w.k.first_block + (w.k.tokens + kKeys - 1) / kKeys;
    return {max(first, w.k.first_block), min(first + a.cohort, end)};
  }

  __device__ Tiles tiles_of(const BackwardWork& w) const {
    const int all = (w.q.tokens + kQueries - 1) / kQueries;
    if (!a.mask.windowed) {
      const Cohort cohort = cohort_of(w);
      return {0, all, (w.block - cohort.first) * all / (cohort.last - cohort.first)};
    }
    const int shift = a.mask.bottom_right ? w.k.tokens - w.q.tokens : 0;
    const int last_key = min(w.first_key + kKeys, w.k.tokens) - 1;
    const int first = max(w.first_key - shift - a.mask.right, 0) / kQueries;
    const int last = (min(last_key - shift + a.mask.left + 1, w.q.tokens) + kQueries - 1) / kQueries;
    return {first, max(first, last), first};
  }

  // How many blocks add to a tile of dq before this one. Not inlined: the loader has few registers.
  __device__ __noinline__ unsigned turn_of(const BackwardWork& w, int tile) const {
    const Cohort cohort = cohort_of(w);
    if (!a.mask.windowed) {
      // From the block that starts at this tile, or just before, downwards and around.
      const int size = cohort.last - cohort.first, mine = w.block - cohort.first;
      const int starts = min(((tile + 1) * size - 1) / w.tiles.count(), size - 1);
      return cohort.first - w.k.first_block + (starts >= mine ? starts - mine : starts - mine + size);
    }
    // From the last block that sees the tile downwards.
    const int shift = a.mask.bottom_right ? w.k.tokens - w.q.tokens : 0;
    const int first_key = max(tile * kQueries + shift - a.mask.left, 0);
    const int last_key = min(tile * kQueries + kQueries - 1 + shift + a.mask.right, w.k.tokens - 1);
    const int first = w.k.first_block + first_key / kKeys,
              last = min(w.k.first_block + last_key / kKeys + 1, cohort.last);
    return max(cohort.first - first, 0) + last - 1 - w.block;
  }

  __device__ int64_t q_tile(const BackwardWork& w, const Visit& at) const {
    return (static_cast<int64_t>(w.batch) * a.heads + at.head) * a.q_blocks.count + w.q.first_block + at.tile;
  }
};

}  // namespace octet::cuda::sm90
