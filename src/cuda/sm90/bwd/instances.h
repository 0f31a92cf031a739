// The instances of the backward kernels. One file per operand type and bins includes this, so that they compile in
// parallel.
#pragma once
#include "cuda/sm90/bwd/kernel.h"
#include "cuda/sm90/bwd/kernel_2cta.h"
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

template <class T, class Dims, Sums sums, Bins bins, Extra extra = Extra::none>
Kernel describe_backward() {
  constexpr int Dim = Dims::kDim;
  if constexpr (tile_dim(Dim) == 256) {
    using Kind = Backward2Cta<T, Dims, sums, bins>;
    return {.function = reinterpret_cast<const void*>(&backward_2cta<T, Dims, sums, bins>),
            .rows = Kind::kQueries,
            .keys = Kind::kClusterKeys,
            .threads = Kind::kThreads,
            .shared_bytes = Kind::kSharedBytes,
            .cluster = Kind::kBlocks,
            .dim = Dim,
            .dim_v = Dims::kDimV};
  } else {
    using Kind = Backward<T, Dim, sums, bins, extra>;
    return {.function = reinterpret_cast<const void*>(&backward<T, Dim, sums, bins, extra>),
            .rows = Kind::kQueries,
            .keys = Kind::kKeys,
            .threads = Kind::kThreads,
            .shared_bytes = Kind::kSharedBytes,
            .dim = Dim,
            .dim_v = Dim};
  }
}

template <class T, Sums sums, Bins bins>
Kernel backward_kernel(int64_t dim, int64_t dim_v) {
  return first_holding(dim, dim_v, BackwardDims<sums, bins>{},
                       []<class Dims>(Dims) { return describe_backward<T, Dims, sums, bins>(); });
}

template <class T, Bins bins, Extra extra>
Kernel backward_kernel_with(int64_t dim, int64_t dim_v) {
  return first_holding(dim, dim_v, std::conditional_t<has_mask(extra), DimsList<Dims64>, ExtraDims>{},
                       []<class Dims>(Dims) { return describe_backward<T, Dims, Sums::floats, bins, extra>(); });
}

template <class T, Bins bins>
Kernel backward_kernel(int64_t dim, int64_t dim_v, Sums sums) {
  return sums == Sums::floats ? backward_kernel<T, Sums::floats, bins>(dim, dim_v)
                              : backward_kernel<T, Sums::integers, bins>(dim, dim_v);
}

}  // namespace octet::cuda::sm90
