// The instances of the backward kernels. One file per operand type and parts includes this, so that they compile in
// parallel.
#pragma once
#include "cuda/sm90/bwd/kernel.h"
#include "cuda/sm90/bwd/kernel_2cta.h"
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

template <class T, int Dim, Sums sums, Parts parts>
Kernel describe_backward() {
  if constexpr (Dim == 256) {
    using Kind = Backward2Cta<T, Dim, sums, parts>;
    return {.function = reinterpret_cast<const void*>(&backward_2cta<T, Dim, sums, parts>),
            .rows = Kind::kQueries,
            .keys = Kind::kClusterKeys,
            .threads = Kind::kThreads,
            .shared_bytes = Kind::kSharedBytes,
            .cluster = Kind::kBlocks};
  } else {
    using Kind = Backward<T, Dim, sums, parts>;
    return {reinterpret_cast<const void*>(&backward<T, Dim, sums, parts>), Kind::kQueries, Kind::kKeys, Kind::kThreads,
            Kind::kSharedBytes};
  }
}

template <class T, int Dim, Parts parts>
Kernel describe_backward(Sums sums) {
  return sums == Sums::floats ? describe_backward<T, Dim, Sums::floats, parts>()
                              : describe_backward<T, Dim, Sums::integers, parts>();
}

template <class T, Parts parts>
Kernel backward_kernel(int dim, Sums sums) {
  return dim == 64    ? describe_backward<T, 64, parts>(sums)
         : dim == 128 ? describe_backward<T, 128, parts>(sums)
                      : describe_backward<T, 256, parts>(sums);
}

}  // namespace octet::cuda::sm90
