// The backward kernels of one type of operands.
#pragma once
#include "cuda/ptx/grid.h"
#include "cuda/sm80/bwd/epilogue.h"
#include "cuda/sm80/bwd/kernels.h"
#include "cuda/sm80/bwd/mainloop.h"
#include "cuda/sm80/bwd/row_sums.h"

namespace octet::cuda::sm80 {

// Calls f with the state of a thread block, once the kernel before has ended.
template <class Kernel, class F>
__device__ void start(const KernelParams& params, const F& f) {
  extern __shared__ __align__(128) unsigned char memory[];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory);
  Kernel kernel{params,
                params.a,
                shared,
                __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0),
                static_cast<int>(threadIdx.x) % 32,
                shared.key_block,
                shared.exponents};
  f(kernel);
}

template <class T, int Dim, BackwardKind kind>
__global__ void __launch_bounds__(Backward<T, Dim, kind>::kThreads, BackwardConfig<Dim, kind>::kBlocks)
    backward_by_mma_sync(const __grid_constant__ KernelParams params) {
  start<Backward<T, Dim, kind>>(params, [](auto& kernel) { kernel.run(blockIdx.x); });
}

template <class T, int Dim, BackwardKind kind>
__global__ void __launch_bounds__(Backward<T, Dim, kind>::kThreads, BackwardConfig<Dim, kind>::kBlocks)
    sweep_by_mma_sync(const __grid_constant__ KernelParams params) {
  start<Backward<T, Dim, kind>>(params, [](auto& kernel) { kernel.sweep(blockIdx.x); });
}

template <class T, int Dim, BackwardKind kind>
BackwardKernel backward_kernel_of() {
  using Kernel = Backward<T, Dim, kind>;
  void (*sweep)(KernelParams) = nullptr;
  if constexpr (Kernel::Projects) sweep = sweep_by_mma_sync<T, Dim, kind>;
  return {.function = backward_by_mma_sync<T, Dim, kind>,
          .sweep = sweep,
          .queries = Kernel::kQueries,
          .keys = Kernel::kKeys,
          .query_parts = Kernel::kQueryParts,
          .key_parts = Kernel::kKeyParts,
          .threads = Kernel::kThreads,
          .shared_bytes = Kernel::kSharedBytes};
}

template <class T, BackwardKind kind>
BackwardKernel backward_kernel(int dim) {
  if constexpr (kind == BackwardKind::large)
    return backward_kernel_of<T, 128, kind>();
  else if constexpr (kind == BackwardKind::masked)
    return dim == 64 ? backward_kernel_of<T, 64, kind>() : backward_kernel_of<T, 128, kind>();
  else
    return with_tile_dim(dim, [](auto tile_dim) { return backward_kernel_of<T, tile_dim, kind>(); });
}

}  // namespace octet::cuda::sm80
