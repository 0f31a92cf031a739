// Included by one file per precision, so that they compile side by side.
#pragma once
#include "cuda/sm90/forward.h"
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

template <class Precision, class Dims, Shape shape>
Kernel describe() {
  using Kind = Forward<Precision, Dims, shape>;
  return {reinterpret_cast<const void*>(&forward<Precision, Dims, shape>), Kind::kRows, Kind::kKeys, Kind::kThreads,
          Kind::kSharedBytes};
}

template <class Precision, class Dims>
Kernel describe(Shape shape) {
  if constexpr (kHasBeta<Precision>)
    return describe<Precision, Dims, Shape::windowed>();  // any mask will do
  else
    return shape == Shape::full ? describe<Precision, Dims, Shape::full>()
                                : describe<Precision, Dims, Shape::windowed>();
}

template <class Precision>
Kernel forward_kernel(DimsIndex dims, Shape shape) {
  switch (dims) {
    case DimsIndex::d64:
      return describe<Precision, Dims64>(shape);
    case DimsIndex::d128:
      return describe<Precision, Dims128>(shape);
    case DimsIndex::d192x128:
      return describe<Precision, Dims192x128>(shape);
    default:
      return describe<Precision, Dims256>(shape);
  }
}

}  // namespace octet::cuda::sm90
