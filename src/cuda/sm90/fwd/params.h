// What kernels are launched with.
#pragma once
#include <cuda.h>

#include "cuda/fragment/mask.h"
#include "cuda/fragment/output.h"
#include "cuda/fragment/precision.h"
#include "cuda/fragment/sinks.h"
#include "cuda/scheduler/tile_scheduler.h"

namespace octet::cuda::sm90 {

struct ForwardParams {
  CUtensorMap q, k, v;                                 // [dim, token, head, batch]
  int q_broadcast[2], k_broadcast[2], v_broadcast[2];  // 0 where all heads, all batch elements are one, else 1
  TileScheduler schedule;
  Mask mask;
  int group;  // heads of q per head of k and v
  int dim_v;
  float scale_log2e;
  float beta, beta_reach;  // bias correction beta
  const float* v_scale;    // [batch, kv_head], powers of two that v was divided by, or null
  // Where q and k are quantized values; those of keys lie in whole tiles, as in Forward8BitParams.
  int keys;  // of a head of k, in whole tiles
  float scale;
  const float *q_scale, *k_scale;  // [batch, head, token], [batch, kv_head, keys]
  const float* mean_logit;         // [batch, head, token]: q times the mean that k lost; null: not wanted
  Output o, o_residual, lse;
  const float* v_mean;  // [batch, kv_head, kernel's dim_v] that v was reduced by; of kCompensated precisions
  Sinks sinks;
  bool clears;                    // rows of v: packed sequences, or keys that no query sees
  Output q_rows, k_rows, v_rows;  // what the tensor maps read, of `dim` and dim_v channels; the type is the kernel's
  int dim;
};

// Keys of 8-bit operands lie in whole multiples of n = kLaidOutKeys: each sequence starts a new one. In packed
// sequences s starts at (first key / n + s) n.
struct Forward8BitParams {
  CUtensorMap q, k;  // quantized values [dim, token, head, batch]
  CUtensorMap v;     // quantized values [key, channel, head, batch], each 16 keys in the order of key_permutation
  int q_broadcast[2], k_broadcast[2];  // 0 where all heads, all batch elements are one, else 1
  bool k_in_tiles;                     // or where the caller has them
  int keys;                            // of a head of v, in whole tiles
  TileScheduler schedule;
  Mask mask;
  int group;  // heads of q per head of k and v
  int dim_v;
  float scale, scale_log2e;
  const float* q_scale;  // [batch, head, token], or null: 1
  const float* k_scale;  // [batch, kv_head, keys], or [.., keys / 64, group], or null
  const float* v_scale;  // [batch, kv_head, tile, 2, key]: log2 of the steps, their inverses; or null
  const float *v_channel_scale,
      *v_mean;              // [sequence, kv_head, kernel's dim_v]: the scale of each channel, the mean; or null
  const float* mean_logit;  // [batch, head, token]: q times the mean that k lost, or null
  Output o, o_residual, lse;
  Sinks sinks;
  Output q_rows, k_rows;  // what the tensor maps read, of `dim` channels; the type is the kernel's
  const unsigned char* v_quantized;
  int dim;
};

}  // namespace octet::cuda::sm90
