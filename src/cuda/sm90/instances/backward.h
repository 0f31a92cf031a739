// Included by one file per operand type, so that they compile side by side.
#pragma once
#include "cuda/sm90/backward.h"
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

template <class T, int Dim, Order order>
Kernel describe_backward() {
  using Kind = Backward<T, Dim, order>;
  return {reinterpret_cast<const void*>(&backward<T, Dim, order>), Kind::kQueries, Kind::kKeys, Kind::kThreads,
          Kind::kSharedBytes};
}

template <class T, int Dim>
Kernel describe_backward(Order order) {
  return order == Order::any ? describe_backward<T, Dim, Order::any>() : describe_backward<T, Dim, Order::fixed>();
}

template <class T>
Kernel backward_kernel(int dim, Order order) {
  return dim == 64    ? describe_backward<T, 64>(order)
         : dim == 128 ? describe_backward<T, 128>(order)
                      : describe_backward<T, 256>(order);
}

}  // namespace octet::cuda::sm90
