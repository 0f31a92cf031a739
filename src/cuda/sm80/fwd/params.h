// The parameters of the forward kernels.
#pragma once
#include "cuda/fragment/mask.h"
#include "cuda/fragment/output.h"
#include "cuda/fragment/sinks.h"
#include "cuda/scheduler/tile_scheduler.h"
#include "cuda/sm80/logits.h"

namespace octet::cuda::sm80 {

struct ForwardParams {
  Output q, k, v;  // in the kernel's element types
  TileScheduler scheduler;
  Mask mask;
  int group;  // heads of q per head of k and v
  int dim, dim_v;
  bool whole_columns;  // true: these are the kernel's
  float scale_log2e;
  LogitTerms terms;        // of kernels with general logits
  float beta, beta_reach;  // of bias correction beta; beta_reach in logits; 0: another one
  const float* v_scale;    // [batch, kv_head]: the power of two that v was divided by; or null
  const float* v_mean;     // [batch, kv_head, the kernel's dim_v]: subtracted from v; kCompensated precisions only
  Output o, o_residual, lse;
  Sinks sinks;
};

}  // namespace octet::cuda::sm80
