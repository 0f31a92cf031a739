// The instances of the 8-bit forward kernel. One file per precision includes this, so that they compile in parallel.
#pragma once
#include "cuda/sm90/fwd/kernel_8bit.h"
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

template <class Precision, class Dims>
Kernel describe_8bit() {
  using Kind = Forward8Bit<Precision, Dims>;
  return {reinterpret_cast<const void*>(&forward_8bit<Precision, Dims>),
          Kind::kRows,
          Kind::kKeys,
          Kind::kThreads,
          Kind::kSharedBytes,
          kLaidOutKeys<Precision, Dims>,
          Kind::Tile::kSkips};
}

template <class Precision>
Kernel forward_8bit_kernel(DimsIndex dims) {
  return dims == DimsIndex::d64 ? describe_8bit<Precision, Dims64>() : describe_8bit<Precision, Dims128>();
}

}  // namespace octet::cuda::sm90
