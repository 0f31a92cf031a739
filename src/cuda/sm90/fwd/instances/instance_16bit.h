// The instances of the 16-bit forward kernel. One file per precision includes this, so that they compile in parallel.
#pragma once
#include "cuda/sm90/fwd/kernel.h"
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

template <class Precision, class Dims>
Kernel describe() {
  using Kind = Forward<Precision, Dims>;
  return {reinterpret_cast<const void*>(&forward<Precision, Dims>), Kind::kRows, Kind::kKeys, Kind::kThreads,
          Kind::kSharedBytes};
}

template <class Precision>
Kernel forward_kernel(DimsIndex dims) {
  switch (dims) {
    case DimsIndex::d64:
      return describe<Precision, Dims64>();
    case DimsIndex::d128:
      return describe<Precision, Dims128>();
    case DimsIndex::d192x128:
      return describe<Precision, Dims192x128>();
    default:
      return describe<Precision, Dims256>();
  }
}

}  // namespace octet::cuda::sm90
