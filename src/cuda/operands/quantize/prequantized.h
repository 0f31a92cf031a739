// q, k and v that came as int8 or uint8, in the form in which the kernels of int8 read those that are quantized here.
// Codes are not rounded again: they are taken as signed bytes, so uint8 and its zero points are 128 less.
#pragma once
#include <cuda_runtime_api.h>

#include "core/problem.h"
#include "core/quantization.h"
#include "cuda/host/workspace.h"
#include "cuda/operands/quantize/quantize.h"
#include "cuda/operands/quantize/zero_point.h"

namespace octet::cuda {

// The mean that was subtracted from each token of a tensor before it was quantized: [sequence, head, dim].
struct PrequantizedMeans {
  View from;             // [batch, head, 1, channel]; null: zeros
  uint64_t seed;         // of the rotation that the means get; 0: none
  int sequences, heads;  // 1 batch element has all sequences where they are packed
  bool packed;
  int dim;  // padded
  float* to;
};
void copy_means(const PrequantizedMeans& means, cudaStream_t stream);

// The rows of q or k. Where `keys` has a tile, rows lie in tiles of keys, as in quantize.h, and those of keys that no
// query sees are 0.
struct PrequantizedRows {
  View from;
  Quantization how;
  signed char* to;        // [batch, head, row, dim]
  int rows, dim;          // of a head, padded
  KeyTiles keys;          // tile 0: rows are tokens
  float* scale;           // [batch, head, row]; NaN where the zero point is no code
  ZeroPoint* zero_point;  // likewise; null: neither q nor k has one
  const float* key_mean;  // of queries: [batch, kv_head, dim], of which mean_logit is the product with each
  int kv_heads;
  float* mean_logit;  // [batch, head, row]; null: not wanted
};
void copy_rows(const PrequantizedRows& rows, cudaStream_t stream);

// The tokens of v, in tiles, with keys along rows as in quantize.h.
struct PrequantizedValues {
  View from;
  Quantization how;
  signed char* to;  // [batch, head, dim, row], each 16 keys in the order of key_permutation
  int dim;          // padded
  KeyTiles keys;
  float* scale;             // as QuantizeParams::v_scale
  signed char* zero_point;  // [batch, head, row], keys in the same order; null: there are none
};
void copy_values(const PrequantizedValues& values, cudaStream_t stream);

}  // namespace octet::cuda
