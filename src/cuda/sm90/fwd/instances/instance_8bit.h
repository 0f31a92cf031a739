// The instances of the 8-bit forward kernel. One file per precision includes this, so that they compile in parallel.
#pragma once
#include "cuda/sm90/fwd/kernel_8bit.h"
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

template <class Precision>
Kernel forward_8bit_kernel(int64_t dim, int64_t dim_v) {
  return first_holding(dim, dim_v, Forward8BitDims{}, []<class Dims>(Dims) -> Kernel {
    using Kind = Forward8Bit<Precision, Dims>;
    return {.function = reinterpret_cast<const void*>(&forward_8bit<Precision, Dims>),
            .rows = Kind::kRows,
            .keys = Kind::kKeys,
            .threads = Kind::kThreads,
            .shared_bytes = Kind::kSharedBytes,
            .laid_out_keys = kLaidOutKeys<Precision, Dims>,
            .skips = Kind::Tile::kSkips,
            .dim = Dims::kDim,
            .dim_v = Dims::kDimV};
  });
}

}  // namespace octet::cuda::sm90
