// Rows in int8 of which the tokens of a block share a scale (SageBwd): blocks are counted from the first token of each
// sequence. Values and scales equal those of the CPU bit by bit (core/quant).
#pragma once
#include <cuda_runtime_api.h>

#include "core/problem.h"
#include "cuda/host/workspace.h"
#include "cuda/operands/quantize/quantize.h"
#include "cuda/operands/token_flags.h"

namespace octet::cuda {

constexpr int kScaledQueries = 128, kScaledKeys = 64;  // of a block of q, and of k and v

// The rows of one operand before and after. Tokens that see nothing, or that nobody sees, become 0, and so do those
// that are not finite, whose scale is NaN; none of them counts in the scale of its block.
struct BlockScaledRows {
  Strided from;
  signed char* to;        // [batch, head, row, dim]
  float* scale;           // [batch, head, row]: that of the row's block
  float* block_scale;     // [batch, head, block]; null: not wanted
  KeyTiles blocks;        // of these tokens
  KeyTiles keys;          // of the keys of the same sequences
  bool of_queries;        // the tokens are queries, else keys
  bool in_tiles;          // rows lie in the tiles of `blocks`, else as tokens do
  TokenFlags seen;        // tokens that a mask tensor does not hide from all others; null: all
  int dim, kv_heads;      // dim: padded
  const float* mean;      // [sequence, kv_head, dim]: subtracted from each row; null: none
  const float* key_mean;  // likewise: mean_logit is the product with it
  float* mean_logit;      // [batch, head, row]; null: not wanted

  int rows() const { return in_tiles ? blocks.count() * blocks.tile : static_cast<int>(from.shape[2]); }  // of a head
  std::size_t block_count() const { return static_cast<std::size_t>(from.shape[0] * from.shape[1]) * blocks.count(); }
  std::size_t count() const { return static_cast<std::size_t>(from.shape[0] * from.shape[1]) * rows(); }
};
void quantize_blocks(const BlockScaledRows& rows, cudaStream_t stream);

}  // namespace octet::cuda
