// The tiles that the queries of a problem are divided into, on the host.
#pragma once
#include <cuda_runtime_api.h>

#include "core/problem.h"
#include "cuda/host/workspace.h"
#include "cuda/scheduler/head_groups.h"

namespace octet::cuda {

struct TileScheduler;  // tile_scheduler.h, which is device code

// Allocates what the scheduler of packed sequences needs of the workspace; null for other problems.
int* allocate_blocks_before(const Problem& p, WorkspaceAllocator& allocator);

// Returns the scheduler of tiles of `rows` queries of `tile_heads` heads each, without a counter, and counts the blocks
// of packed sequences.
TileScheduler tile_scheduler(const Problem& p, int rows, const HeadGroups& head_groups, int* blocks_before,
                             cudaStream_t stream, int tile_heads = 1);

// Returns the blocks of `rows` queries of a head, where packed sequences are one.
int64_t query_blocks(const Problem& p, int rows);

// Returns the tiles of all heads; for packed sequences, whose lengths lie on the device, at least as many.
int64_t query_tiles(const Problem& p, int rows, int tile_heads = 1);

}  // namespace octet::cuda
