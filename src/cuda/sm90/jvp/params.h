// The parameters of the jvp kernels.
#pragma once
#include <cuda.h>

#include "cuda/fragment/mask.h"
#include "cuda/fragment/output.h"
#include "cuda/fragment/sinks.h"
#include "cuda/scheduler/tile_scheduler.h"

namespace octet::cuda::sm90 {

// An input in the kernel's element type.
struct JvpInput {
  CUtensorMap map;   // [dim, token, head, batch]
  int broadcast[2];  // {head, batch}: 0 where all heads, or all batch elements, share the same memory, else 1
  Output rows;       // the tensor behind the map
};

struct JvpParams {
  JvpInput q, k, v, tq, tk, tv;
  TileScheduler scheduler;
  Mask mask;
  int group;  // heads of q per head of k and v
  int dim, dim_v;
  float scale, scale_log2e;
  bool clears;  // true: some tiles of v have rows that no query sees, or of another sequence, which become zeros
  Output o, to, lse, tlse;
  Sinks sinks, tsinks;
};

}  // namespace octet::cuda::sm90
