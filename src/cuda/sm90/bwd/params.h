// What the kernels of the backward pass are launched with.
//
// Operands are params as tiles: for each head, blocks of rows as shared memory will hold them (sm90/smem.h), padded
// with zeros, so that a tile is one contiguous copy. Each is a power of two times the caller's numbers, one exponent
// for each (batch, kv head) and tensor. k and v, which are read once for each block of keys, need not be params where
// they are rows that TMA reads (sm90/bwd/convert_keys.h).
#pragma once
#include <cuda.h>

#include <cstdint>

#include "cuda/fragment/mask.h"
#include "cuda/fragment/output.h"
#include "cuda/scheduler/head_groups.h"

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
  __device__ int tokens_of(int s) const { return cu_seqlens ? cu_seqlens[s + 1] - cu_seqlens[s] : tokens; }
  // The packed sequence that a token belongs to.
  __device__ int sequence_at(int token) const {
    int low = 0, high = sequences;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (token >= cu_seqlens[middle] ? low : high) = middle;
    }
    return low;
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

// Rows of do may differ by more than ds in f16 holds. The queries of such a (batch, kv head) are worked on in parts, by
// how large their rows are: one part after another, with exponents of its own and the P of all other queries 0. The
// first part has the smallest rows.
constexpr int kParts = 3;

// The exponents of one part of a (batch, kv head): its operands are 2^exponent times the caller's numbers. All parts
// have the same q, k and v.
struct Exponents {
  int q, k, v, do_;
  int product;         // do v^T is multiplied by 2 to this exponent before ds is rounded
  float dq_sums_unit;  // where dq is summed as integers: times QueryRows::dq_unit, how many of them are 1
  float largest_v;     // of operand v, for which ds stays within f16
  int parts;           // of the (batch, kv head); 1: all of its queries are worked on together
  float largest_row;   // of the part: what |do| + |dlse| / per_dlse is at most
  int dq;              // times 2 to this exponent, sums of dq in floats are what the first part's are
};
// What a head's exponent of k is at most where the kernel converts k: a block with larger k adds to dq its sums times
// the power of two that it takes less, which shall be floats. A block of a head with this exponent takes what suits its
// own k.
constexpr int kMaxKeyExponent = 40;
// Of a block of keys.
struct KeyExponents {
  int16_t k, v;
  int16_t ds;  // ds is 2^-ds of what the head's exponents make it
};

// What a tile of queries has beside q and do.
template <int kQueries>
struct QueryRows {
  // In base 2 less weight_exponent, and less what k's mean adds to the row's logits; infinite for queries that see
  // nothing, or that belong to another part.
  float lse[kQueries];
  float delta[kQueries];    // as the products have it
  float dq_unit[kQueries];  // see Exponents::dq_sums_unit; NaN once a sum of the row was not finite
  int first;                // query of the tile, within its sequence
  int tile;                 // its number among those of all heads
  int spoiled;              // whether dq has a number that is not finite
  int padding;              // to whole words of 16 bytes
};

// Those of a tile as a part has them: [part][batch, head, q block], `tiles` for each part. The first part's delta and
// unit are those of all queries, with its exponents.
template <int kQueries>
__device__ QueryRows<kQueries>& rows_at(unsigned char* rows, int part, int64_t tiles, int64_t tile) {
  return reinterpret_cast<QueryRows<kQueries>*>(rows)[part * tiles + tile];
}

constexpr float kLargestUnit = 0x1p126f;

// What an integer of a row's sums of dq is one of: a power of two, or NaN.
__device__ inline float unit_of_sums(float row_unit, float dq_sums_unit) {
  const float unit = row_unit * dq_sums_unit;
  return unit > kLargestUnit ? kLargestUnit : unit;
}

struct BackwardParams {
  // Tiles: q, do [batch, head, q block], k (less its mean), v [batch, kv head, k block]. k and v are null where the
  // kernel converts k_rows and v_rows.
  const unsigned char *q, *k, *v, *do_;
  CUtensorMap k_rows, v_rows;  // [dim, token, kv head, batch], 64 channels of a block of keys
  bool rows_are_bf16;
  const float* k_mean;  // [batch, kv head][dim]
  unsigned char* rows;  // [part][batch, head, q block]: QueryRows
  void* dq;             // [batch, head, q block]: sums, float or int, as the warpgroups hold them
  int zeroed_heads;  // so many of the first (batch, kv head) have sums of 0 from the start; the kernel clears others'
  unsigned* zeroed;  // [batch, kv head]: how many shares of their sums it has cleared
  const Exponents* exponents;  // [batch, kv head][part]
  Blocks q_blocks, k_blocks;
  Mask mask;
  int batch, heads, kv_heads;
  int dim, dim_v;
  unsigned* counter;
  HeadGroups head_groups;  // of kv heads
  float scale;             // of the logits
  int weight_exponent;     // p is rounded times 2 to this exponent
  Output dk, dv;
  // [batch, head, q block, query]: sum_j ds_ij, which times k's mean belongs to dq. Null where it is 0, as without
  // sinks and a gradient of lse, or where k has lost no mean.
  const float* row_sums;

  __device__ int q_tiles() const { return batch * heads * q_blocks.count; }  // of all heads
};

}  // namespace octet::cuda::sm90
