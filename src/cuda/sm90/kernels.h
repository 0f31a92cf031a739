// The kernels of this generation, by what they are built for.
#pragma once
#include <cstdint>

#include "cuda/sm90/bwd/config.h"
#include "cuda/sm90/fwd/config.h"

namespace octet::cuda::sm90 {

enum class DimsIndex : int { d64, d128, d192x128, d256 };

struct Kernel {
  const void* function;
  int rows, keys;  // of a tile
  int threads, shared_bytes;
  int laid_out_keys = 0;  // keys lie in whole multiples of this many; 8 bits
  bool skips = false;     // its warpgroups pass over what lies after a block
  int cluster = 1;        // thread blocks that share a tile
};

template <class Precision>
Kernel forward_kernel(DimsIndex dims);

// Up to d128.
template <class Precision>
Kernel forward_8bit_kernel(DimsIndex dims);

// rows: queries of a tile.
template <class T>
Kernel backward_kernel(int dim, Sums sums);

}  // namespace octet::cuda::sm90
