// The entry of the forward kernel, and the description of its instances.
#pragma once
#include "cuda/ptx/grid.h"
#include "cuda/sm80/fwd/kernels.h"
#include "cuda/sm80/fwd/mainloop_doubled.h"
#include "cuda/sm80/fwd/mainloop_wide.h"

namespace octet::cuda::sm80 {

template <class Kind>
__global__ void __launch_bounds__(Forward<Kind>::kThreads, Forward<Kind>::Tile::kBlocks)
    forward_kernel(const __grid_constant__ ForwardParams arguments) {
  using Kernel = Forward<Kind>;
  extern __shared__ __align__(128) unsigned char memory[];
  const Kernel kernel{arguments, *reinterpret_cast<typename Kernel::Shared*>(memory)};
  if constexpr (Kernel::kPairs) ptx::griddepcontrol_launch_dependents();  // fwd/combine.cu, which waits
  if constexpr (Kernel::Tile::kStages == 1)
    kernel.run_wide();
  else if constexpr (doubles<typename Kernel::Tile>())
    kernel.run_doubled();
  else
    kernel.run();
}

// Calls f with the head dims of a kernel. Above 256 there is none for masked logits, whose tile of the mask has no
// room, and above 128 none with half the queries or few rows.
template <class Precision, Logits logits, TileRows rows, class F>
ForwardKernel with_head_dims(int64_t most_dim, const F& f) {
  using Widest = typename ForwardOperands<Precision>::WidestDims;
  constexpr bool kWide = std::is_same_v<Widest, Dims512>;
  if (most_dim <= 64) return f(Dims64{});
  if constexpr (has_small_dims(rows)) {
    return f(Dims128{});
  } else {
    if (most_dim <= 128) return f(Dims128{});
    if constexpr (kWide && logits != Logits::masked)
      if (most_dim > 256) return f(Widest{});
    return f(std::conditional_t<kWide, Dims256, Widest>{});
  }
}

template <class Precision, Logits logits, TileRows rows>
ForwardKernel forward_kernel_of(int64_t most_dim) {
  return with_head_dims<Precision, logits, rows>(most_dim, []<class Dims>(Dims) -> ForwardKernel {
    using Kind = ForwardKind<Precision, Dims, logits, rows>;
    using Kernel = Forward<Kind>;
    return {.function = reinterpret_cast<const void*>(&forward_kernel<Kind>),
            .rows = Kernel::kRows,
            .keys = Kernel::kLoadedKeys,
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
