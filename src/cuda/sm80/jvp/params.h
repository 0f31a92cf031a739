// The parameters of the jvp kernels.
#pragma once
#include "cuda/fragment/dropout.h"
#include "cuda/fragment/mask.h"
#include "cuda/fragment/output.h"
#include "cuda/fragment/sinks.h"
#include "cuda/scheduler/tile_scheduler.h"
#include "cuda/sm80/f16_halves.h"
#include "cuda/sm80/jvp/config.h"
#include "cuda/sm80/logits.h"

namespace octet::cuda::sm80 {

struct JvpParams {
  Output q, k, v, tq, tk, tv;  // in the kernel's element type, of f32 in halves
  TileScheduler scheduler;
  Mask mask;
  int group;  // heads of q per head of k and v
  int dim, dim_v;
  float scale;
  LogitTerms terms;  // of kernels with general logits
  Output o, to, lse, tlse;
  Sinks sinks, tsinks;
  Dropout dropout;                                                                   // of kernels with general logits
  TokenFactors q_factors, k_factors, v_factors, tq_factors, tk_factors, tv_factors;  // of f32
};

struct JvpKernel {
  const void* function;
  int dim;                // that tensors in halves have
  int rows, keys, dim_v;  // of a tile
  int threads;
  int shared_bytes;
};

template <class T, Logits logits, Tangents tangents>
JvpKernel jvp_kernel(int64_t dim);

}  // namespace octet::cuda::sm80
