// Tiles of head dims above 256, which the kernels of the general backend have.
#pragma once
#include "cuda/bwd/tile_sizes.h"

namespace octet::cuda {

// Calls f with the dim of tiles, 64, 128, 256 or 512, as a std::integral_constant.
template <class F>
auto with_wide_tile_dim(int dim, const F& f) {
  return dim > 256 ? f(std::integral_constant<int, 512>{}) : with_tile_dim(dim, f);
}

}  // namespace octet::cuda
