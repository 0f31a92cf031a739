// The host functions that the forward and the jvp pass share: the scheduler of a problem, and the launch itself.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/scheduler/query_tiles.h"
#include "cuda/scheduler/tile_scheduler.h"
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

// Returns the scheduler of a problem. `element_bytes` is the size of an element of k and v as the kernel reads them,
// with that of its tangent. `counter` must be 0 when the kernel starts. `blocks_before` has sequences + 1 numbers,
// which a kernel on the stream fills, or is null where sequences are not packed.
TileScheduler scheduler_of(const Problem& p, const Kernel& kernel, int64_t element_bytes, unsigned* counter,
                           int* blocks_before, cudaStream_t stream);

// Sets the counter of a scheduler to 0, or takes it away where thread blocks have few tiles that are alike, or one: a
// launch that clears it would take longer than a counter spares.
void clear_counter(const Problem& p, const Kernel& kernel, TileScheduler& scheduler, cudaStream_t stream);

// Sets {head, batch} to 0 where all heads, or all batch elements, of a tensor share the same memory, else to 1.
void set_broadcast(const View& t, int (&broadcast)[2]);

// Launches one thread block per multiprocessor, or per tile if there are fewer tiles. `waits` is true for kernels that
// call ptx::griddepcontrol_wait.
void launch(const Problem& p, const Kernel& kernel, const TileScheduler& scheduler, void* arguments, bool waits,
            cudaStream_t stream);

}  // namespace octet::cuda::sm90
