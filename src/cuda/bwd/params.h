// The parameters of the backward kernels.
//
// Preprocessing writes the operands as tiles: for each head, blocks of rows in the layout of shared memory
// (operands/panel.h), padded with zeros, so that a tile is loaded by one contiguous copy. An operand is the caller's
// tensor times a power of two, with one exponent for each (batch, kv head) and tensor. k and v are read only once for
// each block of keys. Where TMA can read the caller's rows, they are not preprocessed, but converted by the kernel
// (sm90/bwd/convert_keys.h).
#pragma once
#include <cuda.h>

#include <cstdint>

#include "cuda/bwd/tile_sizes.h"
#include "cuda/fragment/mask.h"
#include "cuda/fragment/output.h"
#include "cuda/operands/panel.h"
#include "cuda/scheduler/head_groups.h"

namespace octet::cuda {

// The tokens of each head, in blocks of `rows`. Each packed sequence starts a new block.
struct Blocks {
  int rows, tokens;
  int count;  // blocks per head; for packed sequences an upper bound
  int sequences;
  const int *cu_seqlens, *blocks_before;  // null: one sequence per batch element

  struct Sequence {
    int index, first, tokens, first_block;  // `first` and `tokens` are its first token and its length
  };
  __device__ Sequence sequence(int s) const {
    return {s, cu_seqlens[s], cu_seqlens[s + 1] - cu_seqlens[s], blocks_before[s]};
  }
  __device__ int tokens_of(int s) const { return cu_seqlens ? cu_seqlens[s + 1] - cu_seqlens[s] : tokens; }
  // Returns the packed sequence that a token belongs to.
  __device__ int sequence_at(int token) const {
    int low = 0, high = sequences;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (token >= cu_seqlens[middle] ? low : high) = middle;
    }
    return low;
  }
  // Returns the sequence that a block belongs to, with index -1 if the block does not exist.
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

// The exponents of one bin (tile_sizes.h) of a (batch, kv head): an operand is 2^exponent times the caller's tensor.
// All bins have the same exponents of q, k and v.
struct Exponents {
  int q, k, v, do_;
  int p;                // P is multiplied by 2^p before it is rounded, see p_exponent()
  int product;          // do v^T is multiplied by 2^product before ds is rounded
  float dq_sums_scale;  // for sums in integers: dq times this and QueryRows::dq_row_scale is rounded to an integer
  float largest_v;      // the largest number of operand v for which ds stays within f16
  int bins;             // bins of the (batch, kv head); 1: all of its queries are computed together
  int dq;               // for sums in floats: 2^dq times dq of this bin has the scale of the first bin's
};
// The largest exponent of k of a head where the kernel converts k. A block with larger k takes a smaller exponent and
// multiplies its dq by the difference of both, which must be representable as a float. In a head with this exponent,
// each block takes the exponent that fits its own k.
constexpr int kMaxKeyExponent = 40;
// The exponents of a block of keys.
struct KeyExponents {
  int16_t k, v;
  int16_t ds;  // ds is 2^-ds times the ds that follows from the head's exponents
};

// The values of each query that are loaded beside a tile of q and do.
template <int kQueries>
struct QueryRows {
  // lse in base 2, minus Exponents::p and minus what the mean of k adds to the row's logits; infinite for queries that
  // see no key or that belong to another bin.
  float lse[kQueries];
  float delta[kQueries];         // in the scale of the products dp
  float dq_row_scale[kQueries];  // see Exponents::dq_sums_scale; NaN once a sum of the row was not finite
  int first;                     // the tile's first query, within its sequence
  int tile;                      // the tile's number among those of all heads
  int nonfinite;                 // 1: dq has a number that is not finite
  int padding;                   // to a multiple of 16 bytes
};

// Returns the rows of a tile for one bin, of an array [bin][batch, head, q block] with `tiles` tiles for each bin.
// The first bin has delta and dq_row_scale of all queries, with its exponents.
template <int kQueries>
__device__ QueryRows<kQueries>& rows_at(unsigned char* rows, int bin, int64_t tiles, int64_t tile) {
  return reinterpret_cast<QueryRows<kQueries>*>(rows)[bin * tiles + tile];
}

constexpr float kMaxDqScale = 0x1p126f;

// Returns the factor by which dq of a row is multiplied before it is rounded to integers: a power of two, or NaN.
__device__ inline float dq_scale_of(float row_scale, float dq_sums_scale) {
  const float scale = row_scale * dq_sums_scale;
  return scale > kMaxDqScale ? kMaxDqScale : scale;
}

// Returns the channel of a column of a tile, or a number that is no channel. A 2-CTA cluster divides the channels: the
// first half of 256 columns begins with the `block_channels` channels of one thread block, the second half with those
// of the other. What follows them is padding, or repeats channels.
template <int TileDim>
__device__ int channel_of(int column, int block_channels) {
  if constexpr (TileDim < 256) return column;
  const int block = column / (TileDim / 2), of_block = column % (TileDim / 2);
  return of_block < block_channels ? block * block_channels + of_block : TileDim;
}

// Returns the column at which a tile of 256 repeats the channel of a column, or a negative number. The channels of a
// thread block that are beyond a panel follow those of the other, where there is room: so two panels of one half and
// one of the other have all channels.
__device__ inline int repeated_column(int column, int block_channels) {
  constexpr int kHalf = 128;
  const int beyond = column % kHalf - kPanelColumns, of_block = block_channels + beyond;
  if (beyond < 0 || beyond >= block_channels - kPanelColumns || of_block >= kHalf) return -1;
  return (column < kHalf ? kHalf : 0) + of_block;
}

struct BackwardParams {
  // Tiles: q, do [batch, head, q block]; k (centred by its mean), v [batch, kv head, k block]. k and v are null where
  // the kernel converts k_rows and v_rows.
  const unsigned char *q, *k, *v, *do_;
  CUtensorMap k_rows, v_rows;  // [dim, token, kv head, batch], in boxes of 64 channels of a block of keys
  bool rows_are_bf16;
  const float* k_mean;  // [batch, kv head][mean_dim], with `sequence_means` [sequence, kv head][mean_dim]
  int mean_dim;
  bool sequence_means;
  unsigned char* rows;  // [bin][batch, head, q block]: QueryRows
  void* dq;             // [batch, head, q block]: sums, float or int, in the order of the accumulators
  int zeroed_heads;     // the first (batch, kv head)s whose sums are 0 from the start; the kernel clears the others'
  unsigned* zeroed;     // [batch, kv head]: the number of shares of the sums that the kernel has cleared
  const Exponents* exponents;  // [bin][batch, kv head]
  const unsigned* divided;     // see PreprocessParams
  Blocks q_blocks, k_blocks;
  Mask mask;
  int batch, heads, kv_heads;
  int dim, dim_v;
  int block_channels;  // of dq, see channel_of
  unsigned* counter;
  HeadGroups head_groups;  // of kv heads
  float scale;             // softmax_scale
  Output dk, dv;
  // [batch, head, q block, query]: sum_j ds_ij. dq gets this sum times the mean of k. Null where the sum is 0, which it
  // is without sinks and without a gradient of lse, or where k was not centred.
  const float* row_sums;

  __device__ int q_tiles() const { return batch * heads * q_blocks.count; }  // tiles of all heads
};

}  // namespace octet::cuda
