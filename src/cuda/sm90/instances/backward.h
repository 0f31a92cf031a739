// Included by one file per operand type, so that they compile side by side.
#pragma once
#include "cuda/sm90/backward.h"
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

template <class T, int Dim>
Kernel describe_backward() {
  using Kind = Backward<T, Dim>;
  return {reinterpret_cast<const void*>(&backward<T, Dim>), Kind::kQueries, Kind::kKeys, Kind::kThreads,
          Kind::kSharedBytes};
}

template <class T>
Kernel backward_kernel(int dim) {
  return dim == 64 ? describe_backward<T, 64>() : describe_backward<T, 128>();
}

}  // namespace octet::cuda::sm90
