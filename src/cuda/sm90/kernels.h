// The kernels of sm90, by their template parameters.
#pragma once
#include <cstdint>

#include "cuda/sm90/bwd/config.h"
#include "cuda/sm90/fwd/config.h"

namespace octet::cuda::sm90 {

enum class DimsIndex : int { d64, d128, d192x128, d256 };

struct Kernel {
  const void* function;
  int rows, keys;  // of a tile; rows are queries
  int threads, shared_bytes;
  int laid_out_keys = 0;  // 8-bit kernels: keys are laid out in whole multiples of this many
  bool skips = false;     // its warpgroups skip rows beyond the end of a tail tile
  int cluster = 1;        // thread blocks of a cluster, which share a tile
};

template <class Precision>
Kernel forward_kernel(DimsIndex dims);

// 8-bit kernels exist up to d128.
template <class Precision>
Kernel forward_8bit_kernel(DimsIndex dims);

template <class T>
Kernel backward_kernel(int dim, Sums sums);

}  // namespace octet::cuda::sm90
