// Chooses the block of queries that a thread block works on next.
//
// Thread blocks are persistent and take numbers from a counter, so that short blocks of a causal mask balance long
// ones. Within a head, numbers start at the last block of queries, which a causal mask makes the longest. Where few
// blocks are alike, or each thread block has one, no counter is needed: their numbers are those of the thread blocks in
// turn.
//
// Where all blocks are alike, the last ones (tail tiles) may be shorter, so that all multiprocessors end together.
#pragma once
#include <cstdint>

#include "cuda/scheduler/head_groups.h"

namespace octet::cuda {

// A tile: a block of queries of one head of one sequence.
struct TileInfo {
  int batch, head;
  int q_first, q_tokens;  // of the sequence; q_first counts within its batch element
  int k_first, k_tokens;
  int q_start;  // the first query, within the sequence; -1: no tile is left
  int sequence;
  int rows;  // the most that the tile has

  __device__ bool valid() const { return q_start >= 0; }
};

struct TileScheduler {
  int batch, heads;
  int q_tokens, k_tokens;  // of each batch element; of all packed sequences together
  int rows;                // queries per block
  int full_blocks;         // per head; tail tiles come after the full ones of all heads; unused for packed sequences
  int tail_blocks, tail_rows;
  HeadGroups head_groups;
  unsigned* counter;  // is 0 when the kernel starts; null: thread blocks take numbers in turn

  // Packed sequences, or null: the first token of each sequence, and the number of blocks in the sequences before it.
  const int *cu_seqlens_q, *cu_seqlens_k, *blocks_before;
  int sequences;

  __device__ TileInfo at(unsigned number) const { return cu_seqlens_q ? packed(number) : unpacked(number); }

  // Returns the number that this thread block takes after `number`; the first is that of the thread block.
  __device__ unsigned after(unsigned number) const { return gridDim.x + (counter ? atomicAdd(counter, 1u) : number); }

  // Returns the index of the first query of a tile's sequence in arrays [batch, head, token].
  __device__ int64_t row_of(const TileInfo& tile) const {
    return (static_cast<int64_t>(tile.batch) * heads + tile.head) * q_tokens + tile.q_first;
  }

  __device__ TileInfo unpacked(unsigned number) const {
    const unsigned all_heads = batch * heads, all_full = full_blocks * all_heads;
    const bool full = number < all_full;
    if (!full) number -= all_full;
    const unsigned blocks = full ? full_blocks : tail_blocks;
    if (number >= blocks * all_heads) return {.q_start = -1};
    const int queries = full ? rows : tail_rows;
    const auto [head, block] = head_groups.tile_of(number, blocks, all_heads);
    return {static_cast<int>(head / heads),
            static_cast<int>(head % heads),
            0,
            q_tokens,
            0,
            k_tokens,
            (full ? 0 : full_blocks * rows) + static_cast<int>(blocks - 1 - block) * queries,
            static_cast<int>(head / heads),
            queries};
  }

  __device__ TileInfo packed(unsigned number) const {
    if (number >= static_cast<unsigned>(blocks_before[sequences]) * heads) return {.q_start = -1};
    int low = 0, high = sequences;  // the last sequence that starts at or before this block
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (number >= static_cast<unsigned>(blocks_before[middle]) * heads ? low : high) = middle;
    }
    const unsigned rest = number - static_cast<unsigned>(blocks_before[low]) * heads;
    const int q_first = cu_seqlens_q[low], n = cu_seqlens_q[low + 1] - q_first;
    const int k_first = cu_seqlens_k[low], m = cu_seqlens_k[low + 1] - k_first;
    return {0,
            static_cast<int>(rest % heads),
            q_first,
            n,
            k_first,
            m,
            (n - 1) / rows * rows - static_cast<int>(rest / heads) * rows,
            low,
            rows};
  }
};

}  // namespace octet::cuda
