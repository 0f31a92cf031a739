// What the forward launches share: the schedule of a problem, its mask, the launch itself.
#pragma once
#include <cuda_runtime_api.h>

#include "core/problem.h"
#include "cuda/fragment/mask.h"
#include "cuda/scheduler/tile_scheduler.h"
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

// Packed sequences; 0 where they are not.
int sequences_of(const Problem& p);

// `element_bytes`: of k and v as the kernel reads them. `counter`: one number of scratch, 0 when the kernel starts.
// `blocks_before`: [sequences + 1] of them, null unless packed, params on the stream.
TileScheduler schedule_of(const Problem& p, const Kernel& kernel, int64_t element_bytes, unsigned* counter,
                          int* blocks_before, cudaStream_t stream);

// Sets it to 0, where nothing else does.
void clear(unsigned* counter, cudaStream_t stream);

Mask mask_of(const Problem& p);

SeenKeys seen_keys(const Problem& p);

// 0 where all heads, all batch elements of a tensor are one, else 1.
void set_broadcast(const View& t, int (&broadcast)[2]);

// Where the last round of blocks would leave multiprocessors idle: shorter blocks at the end of each head. The kernel
// is one whose warpgroups pass over what lies after a block.
void shorten_tail(const Problem& p, TileScheduler& schedule);

// On every multiprocessor, or as many as there are blocks of queries. `waits`: the kernel begins with
// ptx::griddepcontrol_wait.
void launch(const Problem& p, const Kernel& kernel, const TileScheduler& schedule, void* arguments, bool waits,
            cudaStream_t stream);

}  // namespace octet::cuda::sm90
