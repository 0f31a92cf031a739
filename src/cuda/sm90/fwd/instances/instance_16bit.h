// The instances of the 16-bit forward kernel. One file per precision includes this, so that they compile in parallel.
#pragma once
#include "cuda/sm90/fwd/kernel.h"
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

template <class Precision>
Kernel forward_kernel(int64_t dim, int64_t dim_v) {
  return first_holding(dim, dim_v, ForwardDims<Precision>{}, []<class Dims>(Dims) -> Kernel {
    using Kind = Forward<Precision, Dims>;
    return {.function = reinterpret_cast<const void*>(&forward<Precision, Dims>),
            .rows = Kind::kRows,
            .keys = Kind::kKeys,
            .threads = Kind::kThreads,
            .shared_bytes = Kind::kSharedBytes,
            .dim = Dims::kDim,
            .dim_v = Dims::kDimV};
  });
}

}  // namespace octet::cuda::sm90
