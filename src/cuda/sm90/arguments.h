// What kernels are launched with.
#pragma once
#include <cuda.h>

#include "cuda/attn/mask.h"
#include "cuda/attn/output.h"
#include "cuda/attn/precision.h"
#include "cuda/sm90/schedule.h"

namespace octet::cuda::sm90 {

struct ForwardArguments {
  CUtensorMap q, k, v;                                 // [dim, token, head, batch]
  int q_broadcast[2], k_broadcast[2], v_broadcast[2];  // 0 where all heads, all batch elements are one, else 1
  Schedule schedule;
  Mask mask;
  int group;  // heads of q per head of k and v
  int dim_v;
  float scale_log2e;
  float beta, beta_reach;  // remedy beta
  const float* v_scale;    // [batch, kv_head], powers of two that v was divided by, or null
  Output o, o_residual, lse;
};

}  // namespace octet::cuda::sm90
