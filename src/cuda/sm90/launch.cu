#include <algorithm>

#include "cuda/host/card.h"
#include "cuda/host/launch.h"
#include "cuda/sm90/launch.h"

namespace octet::cuda::sm90 {
namespace {

// Returns groups of as many heads as keep all multiprocessors busy, if their k and v fit in L2 together: what the heads
// of a group read and write passes through L2, too.
HeadGroups head_groups_by_keys(const Problem& p, int rows, int64_t element_bytes) {
  const int64_t all = p.batch * p.heads;
  if (!p.windowed) return one_by_one(all);
  constexpr int64_t kShareOfL2 = 32 << 20;  // bytes
  const int64_t head_bytes = std::max<int64_t>(element_bytes * p.tokens_k * (p.dim + p.dim_v), 1);
  const int64_t processors = card(p.device_index).multiprocessors, blocks = std::max<int64_t>(query_blocks(p, rows), 1);
  const int64_t blocks_of_keys = blocks * p.group();  // of the heads that share k and v
  const int64_t kv_heads = std::min(kShareOfL2 / head_bytes, (processors + blocks_of_keys - 1) / blocks_of_keys);
  return head_groups_of(all, blocks, kv_heads * p.group(), processors);
}

// Returns the tiles of all heads; for packed sequences, whose lengths lie on the device, at least as many.
int64_t tiles_of(const Problem& p, const Kernel& kernel, const TileScheduler& scheduler) {
  if (p.packed()) return query_tiles(p, kernel.rows);
  return static_cast<int64_t>(scheduler.full_blocks + scheduler.tail_blocks) * p.batch * p.heads;
}

}  // namespace

TileScheduler scheduler_of(const Problem& p, const Kernel& kernel, int64_t element_bytes, unsigned* counter,
                           int* blocks_before, cudaStream_t stream) {
  const HeadGroups head_groups = head_groups_by_keys(p, kernel.rows, element_bytes);
  TileScheduler scheduler = tile_scheduler(p, kernel.rows, head_groups, blocks_before, stream);
  scheduler.counter = counter;
  return scheduler;
}

void clear_counter(const Problem& p, const Kernel& kernel, TileScheduler& scheduler, cudaStream_t stream) {
  constexpr int64_t kMostTurns = 4;
  const int64_t tiles = tiles_of(p, kernel, scheduler), processors = card(p.device_index).multiprocessors;
  const bool alike = !p.windowed && !p.packed();
  if (tiles <= (alike ? kMostTurns : 1) * processors)
    scheduler.counter = nullptr;
  else
    clear(scheduler.counter, stream);
}

void set_broadcast(const View& t, int (&broadcast)[2]) {
  broadcast[0] = t.stride[1] != 0;
  broadcast[1] = t.stride[0] != 0;
}

void launch(const Problem& p, const Kernel& kernel, const TileScheduler& scheduler, void* arguments, bool waits,
            cudaStream_t stream) {
  const int processors = card(p.device_index).multiprocessors;
  void* all[] = {arguments};
  const auto grid = static_cast<unsigned>(std::min<int64_t>(tiles_of(p, kernel, scheduler), processors));
  launch_pdl(kernel.function, grid, kernel.threads, kernel.shared_bytes, stream, all, waits);
}

}  // namespace octet::cuda::sm90
