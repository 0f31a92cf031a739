// Pipelines of stages in shared memory between the producer warp and the consumer warpgroups.
#pragma once
#include "cuda/ptx/mbarrier.h"

namespace octet::cuda {

// The position of one side, producer or consumer, in a pipeline of `Stages` stages. The producer waits for the phase
// opposite to the consumer's.
template <int Stages>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++stage == Stages) stage = 0, phase ^= 1;
  }
};

// `full`: the bytes of a stage have arrived. `empty`: all consumers have released the stage.
template <int Stages>
struct Pipeline {
  Barrier full[Stages], empty[Stages];

  __device__ void init(uint32_t consumers) {
    for (int i = 0; i < Stages; ++i) full[i].init(1), empty[i].init(consumers);
  }
};

}  // namespace octet::cuda
