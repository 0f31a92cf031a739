// The rows of the tiles that preprocessing of the backward pass writes, and the sums of dq that postprocessing reads.
#pragma once
#include <type_traits>

namespace octet::cuda {

// A tile of q and do has `kQueries` rows, a tile of k and v `kKeys`.
template <int Dim>
struct BackwardTile {
  static constexpr int kQueries = Dim == 64 ? 128 : 64, kKeys = 128;
};

// Calls f with the dim of tiles, 64, 128 or 256, as a std::integral_constant.
template <class F>
auto with_tile_dim(int dim, const F& f) {
  return dim == 64    ? f(std::integral_constant<int, 64>{})
         : dim == 128 ? f(std::integral_constant<int, 128>{})
                      : f(std::integral_constant<int, 256>{});
}

// The rows of do may differ by more than the range of ds in f16. The queries of such a (batch, kv head) are then
// divided into bins by the magnitude of their rows, the smallest first. Each bin is computed by itself, with its own
// exponents and with P of all other queries set to 0.
constexpr int kBins = 3;
// The bins that a Hopper kernel computes. The kernel for the first bin, which is all queries of most heads, has no
// code for the others. Another kernel follows it, adds the further bins, and exits at once where there are none.
enum class Bins { first, further };

// Partial sums of dq are added as floats in any order, or as integers, whose sum does not depend on the order.
enum class Sums { floats, integers };
// The number of values that a thread adds to the sums of dq with one instruction.
template <int Dim, Sums sums>
constexpr int kSumsAtOnce = sums == Sums::integers ? 1
                            : Dim == 64            ? 4
                            : Dim == 128           ? 2
                                                   : 1;

}  // namespace octet::cuda
