// The kernels of sm90, by their template parameters.
#pragma once
#include <cstdint>

#include "cuda/sm90/bwd/config.h"
#include "cuda/sm90/fwd/config.h"

namespace octet::cuda::sm90 {

struct Kernel {
  const void* function;
  int rows, keys;  // of a tile; rows are queries
  int threads, shared_bytes;
  int laid_out_keys = 0;   // 8-bit kernels: keys are laid out in whole multiples of this many
  bool skips = false;      // its warpgroups skip rows beyond the end of a tail tile
  int cluster = 1;         // thread blocks of a cluster, which share a tile
  int dim = 0, dim_v = 0;  // channels of q and k, and of v, that it multiplies
};

// Return the kernel for a call's head dims, which do not exceed the largest that there are kernels for.
template <class Precision>
Kernel forward_kernel(int64_t dim, int64_t dim_v);
template <class Precision>
Kernel forward_8bit_kernel(int64_t dim, int64_t dim_v);

// Returns the description of `function`, whose tiles are those of Kind.
template <class Kind, class Dims>
Kernel kernel_of(const void* function) {
  return {.function = function,
          .rows = Kind::kRows,
          .keys = Kind::kKeys,
          .threads = Kind::kThreads,
          .shared_bytes = Kind::kSharedBytes,
          .dim = Dims::kDim,
          .dim_v = Dims::kDimV};
}

// Returns what `describe` returns for the first of several head dims that are not below a call's own.
template <class Describe, class... Dims>
Kernel first_holding(int64_t dim, int64_t dim_v, DimsList<Dims...>, const Describe& describe) {
  Kernel kernel{};
  static_cast<void>(((dim <= Dims::kDim && dim_v <= Dims::kDimV && (kernel = describe(Dims{}), true)) || ...));
  return kernel;
}

template <class T, Bins bins>
Kernel backward_kernel(int64_t dim, int64_t dim_v, Sums sums);
template <class T, Bins bins, Extra extra>
Kernel backward_kernel_with(int64_t dim, int64_t dim_v);  // sums of dq are floats

}  // namespace octet::cuda::sm90
