// The parameters of the forward kernels.
#pragma once
#include <cuda.h>

#include "cuda/fragment/alibi.h"
#include "cuda/fragment/dropout.h"
#include "cuda/fragment/mask.h"
#include "cuda/fragment/output.h"
#include "cuda/fragment/precision.h"
#include "cuda/fragment/sinks.h"
#include "cuda/operands/mask_rows.h"
#include "cuda/operands/v_slices.h"
#include "cuda/scheduler/tile_scheduler.h"

namespace octet::cuda::sm90 {

struct ForwardParams {
  CUtensorMap q, k, v;  // [dim, token, head, batch]
  // {head, batch}: 0 where all heads, or all batch elements, share the same memory, else 1.
  int q_broadcast[2], k_broadcast[2], v_broadcast[2];
  TileScheduler scheduler;
  Mask mask;
  int group;  // heads of q per head of k and v
  int dim_v;
  float scale_log2e;
  float beta, beta_limit;  // of bias correction beta; beta_limit in logits before scaling
  const float* v_scale;    // [batch, kv_head]: the power of two that v was divided by; or null
  // The next four are set where q and k are quantized. The keys are padded to whole tiles, as in Forward8BitParams.
  int keys;  // keys of a head, padding included
  float scale;
  const float *q_scale, *k_scale;  // [batch, head, token], [batch, kv_head, keys]
  const float* mean_logit;         // [batch, head, token]: q times the mean subtracted from k; null: not needed
  Output o, o_residual, lse;
  const float* v_mean;  // [batch, kv_head, the kernel's dim_v]: subtracted from v; kCompensated precisions only
  Sinks sinks;
  bool clears;  // true: some tiles of v have rows that no query sees, or of another sequence, which become zeros
  // The tensors behind the tensor maps, with `dim` and dim_v channels, in the kernel's element types.
  Output q_rows, k_rows, v_rows;
  int dim;
  VSlices v_slices;    // of a v that this kernel converts; kCompensated precisions only
  AlibiSlopes slopes;  // kHasAlibi precisions only
  Dropout dropout;     // kHasDropout precisions only
  // kHasMask precisions only: the mask tensor in QkType as TMA reads it, with {query, head, batch} as in q_broadcast;
  // and as the caller has it.
  CUtensorMap mask_tiles;
  int mask_broadcast[3];
  MaskRows mask_rows;
};

// The keys of each sequence of 8-bit operands are padded to a multiple of n = kLaidOutKeys. Packed sequence s starts at
// key (first key / n + s) n.
struct Forward8BitParams {
  CUtensorMap q, k;  // quantized values [dim, token, head, batch]
  CUtensorMap v;     // quantized values [key, channel, head, batch], each 16 keys in the order of key_permutation
  // {head, batch}: 0 where all heads, or all batch elements, share the same memory, else 1.
  int q_broadcast[2], k_broadcast[2];
  bool k_in_tiles;  // true: k is padded as v is; false: k is the caller's tensor
  int keys;         // keys of a head of v, padding included
  TileScheduler scheduler;
  Mask mask;
  int group;  // heads of q per head of k and v
  int dim_v;
  float scale, scale_log2e;
  const float* q_scale;  // [batch, head, token], or null: 1
  const float* k_scale;  // [batch, kv_head, keys], or [.., keys / 64, thread group], or null
  const float* v_scale;  // [batch, kv_head, tile, 2, key]: log2 of the scales, then their inverses; or null
  const float *v_channel_scale, *v_mean;  // [sequence, kv_head, the kernel's dim_v]; or null
  const float* mean_logit;                // [batch, head, token]: q times the mean subtracted from k; or null
  Output o, o_residual, lse;
  Sinks sinks;
  Output q_rows, k_rows;  // the tensors behind the tensor maps, with `dim` channels, in the kernel's element types
  const unsigned char* v_quantized;
  int dim;
};

}  // namespace octet::cuda::sm90
