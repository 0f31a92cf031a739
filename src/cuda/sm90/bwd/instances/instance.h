// The instances of the backward kernels. One file per operand type includes this, so that they compile in parallel.
#pragma once
#include "cuda/sm90/bwd/kernel.h"
#include "cuda/sm90/bwd/kernel_2cta.h"
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

template <class T, int Dim, Sums sums>
Kernel describe_backward() {
  if constexpr (Dim == 256) {
    using Kind = Backward2Cta<T, Dim, sums>;
    return {.function = reinterpret_cast<const void*>(&backward_2cta<T, Dim, sums>),
            .rows = Kind::kQueries,
            .keys = Kind::kClusterKeys,
            .threads = Kind::kThreads,
            .shared_bytes = Kind::kSharedBytes,
            .cluster = Kind::kBlocks};
  } else {
    using Kind = Backward<T, Dim, sums>;
    return {reinterpret_cast<const void*>(&backward<T, Dim, sums>), Kind::kQueries, Kind::kKeys, Kind::kThreads,
            Kind::kSharedBytes};
  }
}

template <class T, int Dim>
Kernel describe_backward(Sums sums) {
  return sums == Sums::floats ? describe_backward<T, Dim, Sums::floats>() : describe_backward<T, Dim, Sums::integers>();
}

template <class T>
Kernel backward_kernel(int dim, Sums sums) {
  return dim == 64    ? describe_backward<T, 64>(sums)
         : dim == 128 ? describe_backward<T, 128>(sums)
                      : describe_backward<T, 256>(sums);
}

}  // namespace octet::cuda::sm90
