// Included by one file per precision, so that they compile side by side.
#pragma once
#include "cuda/sm90/byte_forward.h"
#include "cuda/sm90/kernels.h"

namespace octet::cuda::sm90 {

template <class Precision, class Dims>
Kernel describe_byte_forward() {
  using Kind = ByteForward<Precision, Dims>;
  return {reinterpret_cast<const void*>(&byte_forward<Precision, Dims>),
          Kind::kRows,
          Kind::kKeys,
          Kind::kThreads,
          Kind::kSharedBytes,
          kLaidOutKeys<Precision, Dims>,
          Kind::Tile::kSkips};
}

template <class Precision>
Kernel byte_forward_kernel(DimsIndex dims) {
  return dims == DimsIndex::d64 ? describe_byte_forward<Precision, Dims64>()
                                : describe_byte_forward<Precision, Dims128>();
}

}  // namespace octet::cuda::sm90
