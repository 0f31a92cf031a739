#include <algorithm>

#include "cuda/host/status.h"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/plan.h"

namespace octet::cuda::sm90 {
namespace {

// As many heads as have keys and values that share L2; one where all blocks of a head are alike.
int section_of(const Problem& p, int64_t element_bytes) {
  if (!p.windowed) return 1;
  constexpr int64_t kShareOfL2 = 32 << 20;
  const int64_t head = std::max<int64_t>(element_bytes * p.tokens_k * (p.dim + p.dim_v), 1);
  return static_cast<int>(std::clamp<int64_t>(kShareOfL2 / head * p.group(), 1, p.batch * p.heads));
}

int clamp_side(int64_t keys) { return static_cast<int>(std::min<int64_t>(keys, Mask::kUnbounded)); }

}  // namespace

int sequences_of(const Problem& p) { return p.packed() ? static_cast<int>(p.cu_seqlens_q.shape[3] - 1) : 0; }

Schedule schedule_of(const Problem& p, const Kernel& kernel, int64_t element_bytes, unsigned* counter,
                     int* blocks_before, cudaStream_t stream) {
  const Schedule schedule{.batch = static_cast<int>(p.batch),
                          .heads = static_cast<int>(p.heads),
                          .q_tokens = static_cast<int>(p.tokens_q),
                          .k_tokens = static_cast<int>(p.tokens_k),
                          .rows = kernel.rows,
                          .section = section_of(p, element_bytes),
                          .counter = counter,
                          .cu_seqlens_q = static_cast<const int*>(p.cu_seqlens_q.data),
                          .cu_seqlens_k = static_cast<const int*>(p.cu_seqlens_k.data),
                          .blocks_before = blocks_before,
                          .sequences = sequences_of(p)};
  check(cudaMemsetAsync(counter, 0, sizeof *counter, stream), "cudaMemsetAsync");
  if (p.packed()) count_blocks(schedule.cu_seqlens_q, schedule.sequences, kernel.rows, blocks_before, stream);
  return schedule;
}

Mask mask_of(const Problem& p) { return {p.windowed, p.bottom_right, clamp_side(p.left), clamp_side(p.right)}; }

void set_broadcast(const View& t, int (&broadcast)[2]) {
  broadcast[0] = t.stride[1] != 0;
  broadcast[1] = t.stride[0] != 0;
}

void launch(const Problem& p, const Kernel& kernel, void* arguments, cudaStream_t stream) {
  const int64_t blocks = (p.tokens_q + kernel.rows - 1) / kernel.rows * p.batch + sequences_of(p);
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, p.device_index), "cudaDeviceGetAttribute");
  check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes),
        "cudaFuncSetAttribute");
  void* all[] = {arguments};
  const auto grid = static_cast<unsigned>(std::min<int64_t>(blocks * p.heads, processors));
  check(cudaLaunchKernel(kernel.function, dim3(grid), dim3(kernel.threads), all, kernel.shared_bytes, stream),
        "cudaLaunchKernel");
}

}  // namespace octet::cuda::sm90
