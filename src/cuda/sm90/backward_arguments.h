// What the kernels of the backward pass are launched with.
//
// Operands are prepared as tiles: for each head, blocks of rows as shared memory will hold them (tile/shared.h), padded
// with zeros, so that a tile is one contiguous copy. Each is a power of two times the caller's numbers, one exponent
// for each (batch, kv head) and tensor.
#pragma once
#include <cstdint>

#include "cuda/attn/mask.h"
#include "cuda/attn/output.h"

namespace octet::cuda::sm90 {

// Tokens of each head in blocks of `rows`. Packed sequences start a block each.
struct Blocks {
  int rows, tokens;
  int count;  // blocks per head; packed: at most
  int sequences;
  const int *cu_seqlens, *blocks_before;  // null: one sequence per batch element

  // Sequence, its first token, its length, and its first block.
  struct Sequence {
    int index, first, tokens, first_block;
  };
  __device__ Sequence sequence(int s) const {
    return {s, cu_seqlens[s], cu_seqlens[s + 1] - cu_seqlens[s], blocks_before[s]};
  }
  // The sequence that a block belongs to; index -1: none.
  __device__ Sequence sequence_of(int block) const {
    if (!cu_seqlens) return {0, 0, tokens, 0};
    if (block >= blocks_before[sequences]) return {-1, 0, 0, 0};
    int low = 0, high = sequences;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (block >= blocks_before[middle] ? low : high) = middle;
    }
    return sequence(low);
  }
};

// Exponents of one (batch, kv head): operands are 2^exponent times the caller's numbers.
struct Exponents {
  int q, k, v, do_;
};

struct BackwardArguments {
  // Tiles: q, do [batch, head, q block], k, k_smooth (k minus its mean), v [batch, kv head, k block].
  const unsigned char *q, *k, *k_smooth, *v, *do_;
  // [batch, head, q block][2][query of the block]: lse in base 2 less weight_exponent; delta as the products have it.
  const float* rows;
  float* dq;  // [batch, head, q block]: sums, as the warpgroups hold them
  // [batch, head, q block][8], 0 when the kernel starts: how many blocks of keys have added to dq of a tile, for each
  // warp. Null where they may add in any order.
  unsigned* turns;
  const Exponents* exponents;  // [batch, kv head]
  Blocks q_blocks, k_blocks;
  Mask mask;
  int batch, heads, kv_heads;
  int dim, dim_v;
  unsigned* counter;
  int section;  // kv heads that share L2
  // Blocks of keys of a head that may run at once: no more than the grid has thread blocks for each head of a section.
  int cohort;
  float scale;           // of the logits
  int weight_exponent;   // p is rounded times 2 to this power
  int product_exponent;  // do v^T is multiplied by 2 to this power before ds is rounded
  Output dk, dv;
};

}  // namespace octet::cuda::sm90
