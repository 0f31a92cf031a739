// The backward kernels of one type of operands.
#pragma once
#include "cuda/bwd/wide_tiles.h"
#include "cuda/ptx/grid.h"
#include "cuda/sm80/bwd/epilogue.h"
#include "cuda/sm80/bwd/kernels.h"
#include "cuda/sm80/bwd/mainloop.h"
#include "cuda/sm80/bwd/mainloop_by_keys.h"
#include "cuda/sm80/bwd/mainloop_wide.h"

namespace octet::cuda::sm80 {

// GPUs of compute capability 8 have shared memory for two thread blocks at most.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kMostBlocks = 2;
#else
constexpr int kMostBlocks = 3;
#endif
template <class C>
constexpr int kBlocksOf = C::kBlocks < kMostBlocks ? C::kBlocks : kMostBlocks;

template <class Kind>
__global__ void __launch_bounds__(Backward<Kind>::kThreads, kBlocksOf<typename Kind::Config>)
    backward_by_mma_sync(const __grid_constant__ KernelParams params) {
  using Kernel = Backward<Kind>;
  extern __shared__ __align__(128) unsigned char memory[];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  Kernel{params, params.a, shared, warp, lane, shared.key_block, shared.exponents}.run(blockIdx.x);
}

template <class Kind>
BackwardKernel backward_kernel_of() {
  using Kernel = Backward<Kind>;
  return {.function = backward_by_mma_sync<Kind>,
          .queries = Kernel::kQueries,
          .keys = Kernel::kKeys,
          .tiles_of_key_block = Kernel::kTilesOfKeyBlock,
          .threads = Kernel::kThreads,
          .shared_bytes = Kernel::kSharedBytes,
          .mask_rows = Kernel::kMaskRows,
          .mask_columns = Kernel::kMaskColumns,
          .has_classes = Kernel::kMasked};
}

template <class T, Logits logits, SharedMemory memory>
BackwardKernel backward_kernel(int dim) {
  const auto of = [](auto tile_dim) {
    return backward_kernel_of<BackwardKind<BackwardOperands<T>, tile_dim, logits, memory>>();
  };
  if constexpr (memory == SharedMemory::large && logits == Logits::plain)
    return dim > 256 ? of(std::integral_constant<int, 512>{}) : of(std::integral_constant<int, 128>{});
  else if constexpr (memory == SharedMemory::large)
    return of(std::integral_constant<int, 128>{});
  else if constexpr (logits == Logits::masked)
    return of(std::integral_constant<int, 64>{});
  else
    return with_wide_tile_dim(dim, of);
}

template <Logits logits, SharedMemory memory>
BackwardKernel int8_backward_kernel(int dim) {
  return dim == 64 ? backward_kernel_of<Int8BackwardKind<64, logits, memory>>()
                   : backward_kernel_of<Int8BackwardKind<128, logits, memory>>();
}

template <Logits logits>
BackwardKernel block_backward_kernel(int dim) {
  return dim == 64 ? backward_kernel_of<BlockBackwardKind<64, logits>>()
                   : backward_kernel_of<BlockBackwardKind<128, logits>>();
}

}  // namespace octet::cuda::sm80
