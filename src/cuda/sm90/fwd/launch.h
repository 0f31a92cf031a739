// The host functions that both forward launches share: the scheduler and the mask of a problem, and the launch itself.
#pragma once
#include <cuda_runtime_api.h>

#include "core/backend.h"
#include "cuda/operands/masks.h"
#include "cuda/scheduler/query_tiles.h"
#include "cuda/sm90/fwd/choose.h"

namespace octet::cuda::sm90 {

// The plans of the two kinds of forward kernels.
Plan forward_16bit(const Problem& p, const ForwardChoice& choice, void* workspace);
Plan forward_8bit(const Problem& p, const ForwardChoice& choice, void* workspace);

// Returns the scheduler of a problem. `element_bytes` is the size of an element of k and v as the kernel reads them.
// `counter` must be 0 when the kernel starts. `blocks_before` has sequences + 1 numbers, which a kernel on the stream
// fills, or is null where sequences are not packed.
TileScheduler scheduler_of(const Problem& p, const Kernel& kernel, int64_t element_bytes, unsigned* counter,
                           int* blocks_before, cudaStream_t stream);

// Returns the width of the boxes of 8-bit numbers that TMA reads: the panels of SharedTile8Bit.
constexpr int panel_bytes(int64_t columns) { return columns % 128 == 0 ? 128 : columns % 64 == 0 ? 64 : 32; }

// Sets {head, batch} to 0 where all heads, or all batch elements, of a tensor share the same memory, else to 1.
void set_broadcast(const View& t, int (&broadcast)[2]);

// Makes the last tiles of each head shorter (tail tiles) where the last wave of tiles would leave multiprocessors idle.
// Only for kernels whose warpgroups skip rows beyond the end of a tail tile.
void shorten_tail(const Problem& p, TileScheduler& scheduler);

// Launches one thread block per multiprocessor, or per tile if there are fewer tiles. `waits` is true for kernels that
// call ptx::griddepcontrol_wait.
void launch(const Problem& p, const Kernel& kernel, const TileScheduler& scheduler, void* arguments, bool waits,
            cudaStream_t stream);

}  // namespace octet::cuda::sm90
