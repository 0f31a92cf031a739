// The parameters of the jvp kernels.
#pragma once
#include "cuda/fragment/dropout.h"
#include "cuda/fragment/mask.h"
#include "cuda/fragment/output.h"
#include "cuda/fragment/sinks.h"
#include "cuda/scheduler/tile_scheduler.h"
#include "cuda/sm80/logits.h"

namespace octet::cuda::sm80 {

struct JvpParams {
  Output q, k, v, tq, tk, tv;  // in the kernel's element type
  TileScheduler scheduler;
  Mask mask;
  int group;  // heads of q per head of k and v
  int dim, dim_v;
  float scale;
  LogitTerms terms;  // of kernels with general logits
  Output o, to, lse, tlse;
  Sinks sinks, tsinks;
  Dropout dropout;  // of kernels with general logits
};

struct JvpKernel {
  const void* function;
  int keys, dim_v;  // of a tile
  int shared_bytes;
};

template <class T, Logits logits>
JvpKernel jvp_kernel(int64_t dim);

}  // namespace octet::cuda::sm80
