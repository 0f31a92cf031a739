// The operands of 8-bit kernels: quantized values with scales as the quantisers of the CPU make them (core/quant), bit
// by bit, with keys in whole tiles and v with its keys along rows.
//
// k and v are read twice where means or largest numbers of channels come first.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/fragment/key_range.h"
#include "cuda/fragment/strided.h"

namespace octet::cuda {

// Inverses of the scales of v come times this, so that sums of them are finite for the smallest steps.
constexpr int kInverseScaleLog2 = -16;
constexpr float kInverseScale = 0x1p-16f;

// Tiles of keys: each sequence starts a new one. In packed sequences s starts at tile first key / tile + s.
struct KeyTiles {
  const int* cu_seqlens;  // null: each batch element is a sequence
  int sequences;          // of a batch element
  int tokens;             // of a batch element
  int tile;
  // Who sees them: what no query sees counts as zeros that are not there.
  Mask mask;
  int queries;  // of a batch element
  const int* cu_seqlens_q;

  __host__ __device__ int count() const { return cu_seqlens ? tokens / tile + sequences : (tokens + tile - 1) / tile; }
};

// The mean of each channel of all tokens of a sequence, and 1 / step and scale of each channel of v in e4m3:
// [sequence, head, padded dim]. Null: not wanted.
struct Channels {
  float *k_mean, *v_mean, *v_scale, *v_inverse;
};

enum class Quantized { none, s8, e4m3 };

// A number for each (batch, head) that quantized values came with; data null: 1.
struct HeadScale {
  const float* data;
  int64_t batch_stride, head_stride;

  __device__ float at(int64_t batch, int64_t head) const {
    return data ? data[batch * batch_stride + head * head_stride] : 1.f;
  }
};

// A Hadamard rotation of blocks of channels; block 0: none.
struct Rotation {
  unsigned negative[8];  // bit c: the sign of channel c
  int block;
  float norm;
};

struct QuantizeParams {
  Strided q, k, v;
  HeadScale v_input_scale;
  int dim;  // padded: 64 or 128; 256 for int8 of q and k alone
  int heads, kv_heads;
  KeyTiles keys;
  const int* cu_seqlens_q;
  Channels channels;
  Rotation rotation;
  Quantized q_type, k_type, v_type;  // none: stays as it is
  void *q_quantized, *k_quantized;   // [batch, head, token, padded dim]; k in tiles
  void* v_quantized;  // [batch, head, padded dim, key], in tiles, each 16 keys in the order of key_permutation
  float* q_scale;     // of each token [batch, head, token]
  // Of each token [batch, head, token] in tiles or, with k_groups, of each thread group of 16 keys [batch, head, token
  // / 64, 4] (SageAttention 2, arXiv 2411.10958, section 3.2): of 64 keys of a tile those with equal (key mod 8) div 2.
  float* k_scale;
  bool k_groups;
  // log2 of the scales of v and kInverseScale times their inverses, [batch, head, tile, 2, key]; null: v is not
  // quantized by tokens. A token of zeros has a scale of 2^-40 times its tile's largest, and one that is not finite the
  // logarithm NaN and inverse 0.
  float* v_scale;
  float* mean_logit;  // [batch, head, token]: q times the mean of its keys; null: not wanted
};

// Bytes of scratch that `preprocess` needs, at a multiple of 256. Its first word is not for `preprocess`, which only
// sets it to 0: the counter of the kernel that follows.
std::size_t quantize_scratch_bytes(const QuantizeParams& a);
// All of the above, in one launch.
void quantize(const QuantizeParams& a, void* scratch, cudaStream_t stream);

// steps[batch, head, token] = q's scale times that of the head of k.
void fill_scales(const HeadScale& q, const HeadScale& k, int batch, int heads, int kv_heads, int tokens, float* steps,
                 cudaStream_t stream);

}  // namespace octet::cuda
