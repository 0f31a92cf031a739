// Which block of queries a thread block works on next.
//
// Thread blocks stay on their multiprocessor and draw numbers from a counter, so that long blocks of a causal mask
// balance short ones. Numbers count down from the last block of queries, which a causal mask makes the longest.
//
// Where all blocks are alike, the last ones may be shorter, so that the multiprocessors end together.
#pragma once
#include <cstdint>

#include "cuda/sm90/sections.h"

namespace octet::cuda::sm90 {

// A block of queries of one head of one sequence.
struct Work {
  int batch, head;
  int q_first, q_tokens;  // of the sequence, within its batch element
  int k_first, k_tokens;
  int block;  // its first query, within the sequence; -1: nothing is left
  int sequence;
  int rows;  // that the block has at most
};

struct Schedule {
  int batch, heads;
  int q_tokens, k_tokens;  // of each batch element; packed: of all sequences together
  int rows;                // queries per block
  int whole_blocks;        // of a head: they come first, those of the next fields after them; packed: unused
  int short_blocks, short_rows;
  Sections sections;
  unsigned* counter;  // 0 when the kernel starts

  // Packed sequences, or null: first tokens, and for each sequence the number of blocks before it.
  const int *cu_seqlens_q, *cu_seqlens_k, *blocks_before;
  int sequences;

  __device__ Work at(unsigned number) const { return cu_seqlens_q ? packed(number) : unpacked(number); }

  __device__ Work unpacked(unsigned number) const {
    const unsigned all_heads = batch * heads, all_whole = whole_blocks * all_heads;
    const bool whole = number < all_whole;
    if (!whole) number -= all_whole;
    const unsigned blocks = whole ? whole_blocks : short_blocks;
    if (number >= blocks * all_heads) return {.block = -1};
    const int queries = whole ? rows : short_rows;
    const auto [head, block] = sections.place_of(number, blocks, all_heads);
    return {static_cast<int>(head / heads),
            static_cast<int>(head % heads),
            0,
            q_tokens,
            0,
            k_tokens,
            (whole ? 0 : whole_blocks * rows) + static_cast<int>(blocks - 1 - block) * queries,
            static_cast<int>(head / heads),
            queries};
  }

  __device__ Work packed(unsigned number) const {
    if (number >= static_cast<unsigned>(blocks_before[sequences]) * heads) return {.block = -1};
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

}  // namespace octet::cuda::sm90
