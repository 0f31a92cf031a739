// The instances of the backward kernels. One file per operand type and parts includes this, so that they compile in
// parallel.
#pragma once
#include "cuda/sm90/bwd/kernel.h"
#include "cuda/sm90/bwd/kernel_2cta.h"
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

template <class T, int Dim, Sums sums, Parts parts>
Kernel describe_backward() {
  if constexpr (tile_dim(Dim) == 256) {
    using Kind = Backward2Cta<T, Dim, sums, parts>;
    return {.function = reinterpret_cast<const void*>(&backward_2cta<T, Dim, sums, parts>),
            .rows = Kind::kQueries,
            .keys = Kind::kClusterKeys,
            .threads = Kind::kThreads,
            .shared_bytes = Kind::kSharedBytes,
            .cluster = Kind::kBlocks,
            .dim = Dim,
            .dim_v = Dim};
  } else {
    using Kind = Backward<T, Dim, sums, parts>;
    return {.function = reinterpret_cast<const void*>(&backward<T, Dim, sums, parts>),
            .rows = Kind::kQueries,
            .keys = Kind::kKeys,
            .threads = Kind::kThreads,
            .shared_bytes = Kind::kSharedBytes,
            .dim = Dim,
            .dim_v = Dim};
  }
}

template <class T, Sums sums, Parts parts>
Kernel backward_kernel(int64_t dim) {
  return first_holding(dim, dim, BackwardDims<sums, parts>{},
                       []<class Dims>(Dims) { return describe_backward<T, Dims::kDim, sums, parts>(); });
}

template <class T, Parts parts>
Kernel backward_kernel(int64_t dim, Sums sums) {
  return sums == Sums::floats ? backward_kernel<T, Sums::floats, parts>(dim)
                              : backward_kernel<T, Sums::integers, parts>(dim);
}

}  // namespace octet::cuda::sm90
