// The entry of the forward kernel, and the description of its instances.
#pragma once
#include "cuda/sm80/fwd/kernels.h"
#include "cuda/sm80/fwd/mainloop.h"

namespace octet::cuda::sm80 {

template <class Kind>
__global__ void __launch_bounds__(Forward<Kind>::kThreads, Forward<Kind>::Tile::kBlocks)
    forward_kernel(const __grid_constant__ ForwardParams arguments) {
  using Kernel = Forward<Kind>;
  extern __shared__ __align__(128) unsigned char memory[];
  Kernel{arguments, *reinterpret_cast<typename Kernel::Shared*>(memory)}.run();
}

// Calls f with the head dims of a kernel.
template <class Precision, class F>
ForwardKernel with_head_dims(int64_t most_dim, const F& f) {
  if (most_dim <= 64) return f(Dims64{});
  if (most_dim <= 128) return f(Dims128{});
  return f(typename ForwardOperands<Precision>::WidestDims{});
}

template <class Precision, Logits logits, TileRows rows>
ForwardKernel forward_kernel_of(int64_t most_dim) {
  return with_head_dims<Precision>(most_dim, []<class Dims>(Dims) -> ForwardKernel {
    using Kind = ForwardKind<Precision, Dims, logits, rows>;
    using Kernel = Forward<Kind>;
    return {.function = reinterpret_cast<const void*>(&forward_kernel<Kind>),
            .rows = Kernel::kRows,
            .keys = Kernel::kKeys,
            .rows_of_warp = Kernel::kRowsOfWarp,
            .threads = Kernel::kThreads,
            .shared_bytes = Kernel::kSharedBytes,
            .blocks = Kernel::Tile::kBlocks,
            .masked = Kernel::kMasked,
            .dim = Dims::kDim,
            .dim_v = Dims::kDimV};
  });
}

}  // namespace octet::cuda::sm80
