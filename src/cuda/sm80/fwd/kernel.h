// The entry of the forward kernel, and the description of its instances.
#pragma once
#include "cuda/sm80/fwd/kernels.h"
#include "cuda/sm80/fwd/mainloop.h"

namespace octet::cuda::sm80 {

template <class Precision, class Dims, bool General>
__global__ void __launch_bounds__(Forward<Precision, Dims, General>::kThreads,
                                  (ForwardTile<Dims, General, kF16Parts<Precision>>::kBlocks))
    forward_kernel(const __grid_constant__ ForwardParams arguments) {
  using Kernel = Forward<Precision, Dims, General>;
  extern __shared__ __align__(128) unsigned char memory[];
  Kernel{arguments, *reinterpret_cast<typename Kernel::Shared*>(memory)}.run();
}

template <class Precision, class Dims, bool General>
ForwardKernel describe() {
  using Kind = Forward<Precision, Dims, General>;
  return {reinterpret_cast<const void*>(&forward_kernel<Precision, Dims, General>),
          Kind::kRows,
          Kind::kKeys,
          Kind::kRowsOfWarp,
          Kind::kThreads,
          Kind::kSharedBytes,
          Kind::Tile::kBlocks,
          kMasked<Dims>,
          Dims::kDim,
          Dims::kDimV};
}

// Calls f with the head dims of a kernel.
template <class Precision, class F>
ForwardKernel with_head_dims(int64_t most_dim, const F& f) {
  if (most_dim <= 64) return f(Dims64{});
  if (most_dim <= 128) return f(Dims128{});
  return f(std::conditional_t<kF16Parts<Precision> == 1, Dims256, Dims256x128>{});
}

template <class Precision, bool General, bool Few>
ForwardKernel forward_kernel_of(int64_t most_dim) {
  return with_head_dims<Precision>(most_dim, []<class Dims>(Dims) {
    return describe<Precision, std::conditional_t<Few, Short<Dims>, Dims>, General>();
  });
}

template <class Precision>
ForwardKernel masked_forward_kernel_of(int64_t most_dim) {
  return with_head_dims<Precision>(most_dim,
                                   []<class Dims>(Dims) { return describe<Precision, Masked<Dims>, true>(); });
}

}  // namespace octet::cuda::sm80
