#include "core/error.h"
#include "cuda/host/card.h"
#include "cuda/host/launch.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/masks.h"
#include "cuda/scheduler/key_splits.h"
#include "cuda/sm80/bwd/dmask.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kThreads = 256;

// Each thread has an element; without splits it is 0.
__global__ void __launch_bounds__(kThreads) sum_splits_kernel(const __grid_constant__ DmaskParams d) {
  const int64_t count = d.elements();
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    float sum = 0.f;
    for (int split = 0; split < d.splits; ++split) sum += d.sums[split * count + i];
    const auto key = static_cast<int>(i % d.to.shape[3]);
    const int64_t row = i / d.to.shape[3];
    const auto query = static_cast<int>(row % d.to.shape[2]);
    const auto head = static_cast<int>(row / d.to.shape[2] % d.to.shape[1]),
               batch = static_cast<int>(row / d.to.shape[2] / d.to.shape[1]);
    DmaskParams whole = d;
    whole.sums = nullptr;
    whole.write(0, batch, head, query, key, sum);
  }
}

void launch(const DmaskParams& d, cudaStream_t stream) {
  if (!d.elements()) return;
  sum_splits_kernel<<<blocks_for(d.elements(), kThreads), kThreads, 0, stream>>>(d);
  check(cudaGetLastError(), "sum_splits_kernel");
}

}  // namespace

DmaskParams dmask_params(const Problem& p, int queries, int keys, WorkspaceAllocator& workspace) {
  const auto tiles = [](int64_t tokens, int64_t of) { return static_cast<int>((tokens + of - 1) / of); };
  const auto dimension = [&](int i, int all) { return DmaskDimension{all, p.dmask.shape[i] == 1 ? 1 : all}; };
  DmaskParams d{.to = strided(p.dmask),
                .queries = queries,
                .keys = keys,
                .batches = dimension(0, static_cast<int>(p.batch)),
                .heads = dimension(1, static_cast<int>(p.heads)),
                .query_tiles = dimension(2, tiles(p.tokens_q, queries)),
                .key_tiles = dimension(3, tiles(p.tokens_k, keys)),
                .tokens_q = static_cast<int>(p.tokens_q),
                .tokens_k = static_cast<int>(p.tokens_k),
                .positional = mask_of(p),
                .mask = mask_tensor(p)};
  // Two thread blocks of most kernels have a place on a multiprocessor. A tile of logits takes longer than one of keys
  // in the forward pass, so that starts and sums cost less beside it.
  constexpr SplitCosts kCosts{.block = 0.5, .round = 1, .combine = 2, .split = 0.5, .waiting = 0.5};
  d.splits = key_splits(d.tiles(), d.steps(), {card(p.device_index).multiprocessors, 2}, kCosts);
  if (d.splits > 1) d.sums = workspace.take<float>(static_cast<std::size_t>(d.splits * d.elements()));
  return d;
}

std::string description(const DmaskParams& d) {
  if (!d.queries) return {};
  return text(", dmask in ", d.queries, " x ", d.keys, " tiles",
              d.splits > 1 ? text(", ", d.splits, " thread blocks each") : "");
}

void sum_splits(const DmaskParams& d, cudaStream_t stream) {
  if (d.sums) launch(d, stream);
}

void clear_dmask(const DmaskParams& d, cudaStream_t stream) {
  DmaskParams none = d;
  none.splits = 0;
  launch(none, stream);
}

}  // namespace octet::cuda::sm80
