// Operands of 8-bit kernels: quantized values and scales, equal bit by bit to those of the CPU (core/quant), with keys
// in whole tiles and v transposed, so that its keys run along rows.
//
// k and v are read twice where means or largest magnitudes of channels are needed first.
#pragma once
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "cuda/fragment/positional_mask.h"
#include "cuda/fragment/strided.h"
#include "cuda/operands/token_flags.h"

namespace octet::cuda {

// Inverses of the scales of v are multiplied by this, so that their sums stay finite for the smallest scales.
constexpr int kInverseScaleLog2 = -16;
constexpr float kInverseScale = 0x1p-16f;

// Tiles of keys: each sequence starts a new one. In packed tensors, sequence s starts at tile (first key) / tile + s.
struct KeyTiles {
  const int* cu_seqlens;  // null: each batch element is a sequence
  int sequences;          // of a batch element
  int tokens;             // of a batch element
  int tile;
  // The queries that see the keys: keys that no query sees count as absent, and their quantized values are 0.
  Mask mask;
  int queries;  // of a batch element
  const int* cu_seqlens_q;

  __host__ __device__ int count() const { return cu_seqlens ? tokens / tile + sequences : (tokens + tile - 1) / tile; }
};

// Returns the blocks of `tile` queries of the same sequences.
inline KeyTiles query_blocks(const KeyTiles& keys, int tile) {
  KeyTiles blocks = keys;
  blocks.cu_seqlens = keys.cu_seqlens_q, blocks.tokens = keys.queries, blocks.tile = tile;
  return blocks;
}

// For each channel of a sequence, [sequence, head, padded dim]: its mean over all tokens of k and of v, and for v in
// e4m3 its scale and 1 / scale. Null: not wanted.
struct Channels {
  float *k_mean, *v_mean, *v_scale, *v_inverse;
};

// Which keys of each (batch, kv_head) some query sees, and how many, where a mask tensor hides others, which are 0
// then: these do not count in means, nor, less a mean, in scales that keys share. Null: all that positional masks
// leave.
struct SeenByMask {
  TokenFlags keys;
  const int* counts;  // [batch, head], as many of both as `keys` has

  __device__ int count_of(int batch, int head) const {
    return counts[batch % keys.batches * keys.heads + head % keys.heads];
  }
};

enum class QuantizedFormat { none, s8, e4m3 };

// The scale of prequantized values, for each (batch, head); null data means 1.
struct HeadScale {
  const float* data;
  int64_t batch_stride, head_stride;

  __device__ float at(int64_t batch, int64_t head) const {
    return data ? data[batch * batch_stride + head * head_stride] : 1.f;
  }
};

// A Hadamard rotation of blocks of `block` channels; block 0 means none.
struct Rotation {
  unsigned negative[8];  // bit c is set where the sign of channel c is -1
  int block;
  float norm;
};

// The mean of each tile of 64 keys in f16, each times a power of two of its own: [batch, head, tile, dim] and
// [batch, head, tile]. What is subtracted from keys is mean times factor. Null: not wanted.
struct BlockMeans {
  __half* mean;
  float* factor;
};
constexpr int kBlockKeys = 64;

struct QuantizeParams {
  Strided q, k, v;
  HeadScale v_input_scale;
  int dim;  // padded: 64 or 128, or 256 where all that is quantized becomes int8
  int heads, kv_heads;
  KeyTiles keys;
  const int* cu_seqlens_q;
  Channels channels;
  Rotation rotation;
  QuantizedFormat q_type, k_type, v_type;  // none: not quantized here
  void *q_quantized, *k_quantized;         // [batch, head, token, padded dim]; k in tiles
  void* v_quantized;  // [batch, head, padded dim, key], in tiles, each 16 keys in the order of key_permutation
  float* q_scale;     // [batch, head, token]
  // The scales of k, of each token [batch, head, token] in tiles; with k_groups, of each thread group of 16 keys
  // [batch, head, token / 64, 4] (SageAttention 2, arXiv 2411.10958, section 3.2): of 64 keys of a tile, a group has
  // those with equal (key mod 8) div 2.
  float* k_scale;
  bool k_groups;
  // log2 of the scales of v, and kInverseScale times their inverses, [batch, head, tile, 2, key]; null: v has no scales
  // by tokens. A token of zeros gets a scale of 2^-40 times the largest of its tile, and one that is not finite the
  // logarithm NaN and the inverse 0.
  float* v_scale;
  float* mean_logit;  // [batch, head, token]: q times the mean of its keys; null: not wanted
  SeenByMask seen;
  BlockMeans block_means;  // k is centred by these instead of by k_mean
};

// Returns the bytes of scratch memory that `quantize` needs, at a multiple of 256. `quantize` only sets the first word
// to 0: it is the counter of the kernel that follows.
std::size_t quantize_scratch_bytes(const QuantizeParams& a);
// Quantizes all operands in one launch.
void quantize(const QuantizeParams& a, void* scratch, cudaStream_t stream);

// Sets scales[batch, head, token] to the scale of q times that of the head of k.
void fill_scales(const HeadScale& q, const HeadScale& k, int batch, int heads, int kv_heads, int tokens, float* scales,
                 cudaStream_t stream);

}  // namespace octet::cuda
