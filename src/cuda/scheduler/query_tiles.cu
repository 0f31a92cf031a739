#include <algorithm>

#include "cuda/scheduler/count_blocks.h"
#include "cuda/scheduler/query_tiles.h"
#include "cuda/scheduler/tile_scheduler.h"

namespace octet::cuda {

int* allocate_blocks_before(const Problem& p, WorkspaceAllocator& allocator) {
  return p.packed() ? allocator.take<int>(static_cast<std::size_t>(p.sequence_count()) + 1) : nullptr;
}

int64_t query_blocks(const Problem& p, int rows) { return (p.tokens_q + rows - 1) / rows; }

int64_t query_tiles(const Problem& p, int rows, int tile_heads) {
  const int64_t heads = p.heads / tile_heads;
  if (!p.packed()) return query_blocks(p, rows) * p.batch * heads;
  // Each sequence fills up to rows - 1 places of its last block with nothing, and no block is empty.
  return std::min(p.tokens_q, (p.tokens_q + p.sequence_count() * int64_t{rows - 1}) / rows) * heads;
}

TileScheduler tile_scheduler(const Problem& p, int rows, const HeadGroups& head_groups, int* blocks_before,
                             cudaStream_t stream, int tile_heads) {
  const TileScheduler scheduler{.batch = static_cast<int>(p.batch),
                                .heads = static_cast<int>(p.heads / tile_heads),
                                .q_tokens = static_cast<int>(p.tokens_q),
                                .k_tokens = static_cast<int>(p.tokens_k),
                                .rows = rows,
                                .full_blocks = static_cast<int>(query_blocks(p, rows)),
                                .head_groups = head_groups,
                                .cu_seqlens_q = static_cast<const int*>(p.cu_seqlens_q.data),
                                .cu_seqlens_k = static_cast<const int*>(p.cu_seqlens_k.data),
                                .blocks_before = blocks_before,
                                .sequences = p.packed() ? static_cast<int>(p.sequence_count()) : 0};
  if (p.packed()) count_blocks(scheduler.cu_seqlens_q, scheduler.sequences, rows, blocks_before, stream);
  return scheduler;
}

}  // namespace octet::cuda
