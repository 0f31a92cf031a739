// The kernels that can run a pass of a problem, each known by the name of its tile, and which of them does.
#pragma once
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/problem.h"

namespace octet::cuda {

// "128x48": queries and keys. `also` tells apart what has the same tile: "64x32-split".
struct TileName {
  int queries, keys;
  const char* also = "";
  std::string text() const { return octet::text(queries, 'x', keys, also); }
};

// Kernels that differ in their tiles, in the order of preference.
template <class Kernel>
class Candidates {
 public:
  void add(const TileName& name, const Kernel& kernel) { names_[count_] = name, kernels_[count_++] = kernel; }

  void add(const Candidates& others) {
    for (int i = 0; i < others.count_; ++i) add(others.names_[i], others.kernels_[i]);
  }
  const Kernel& first() const { return kernels_[0]; }

  // Returns the one that a problem wants of a backend, or the first.
  const Kernel& pick(const WantedTile& wanted, std::string_view backend) const {
    if (wanted.name && (!wanted.backend || wanted.backend == backend))
      for (int i = 0; i < count_; ++i)
        if (names_[i].text() == wanted.name) return kernels_[i];
    return kernels_[0];
  }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (int i = 0; i < count_; ++i) all.push_back(names_[i].text());
    return all;
  }

 private:
  static constexpr int kMost = 4;
  std::array<TileName, kMost> names_{};
  std::array<Kernel, kMost> kernels_{};
  int count_ = 0;
};

// The tiles of a pass that has one kernel for a problem.
inline std::vector<std::string> one_tile(int queries, int keys) { return {TileName{queries, keys}.text()}; }

// Says in the name of a kernel, whose tiles are `tiles`, why it is that one.
inline std::string why_this_tile(const WantedTile& wanted, std::string_view backend,
                                 const std::vector<std::string>& tiles) {
  if (!wanted.name || (wanted.backend && wanted.backend != backend)) return {};
  for (const std::string& tile : tiles)
    if (tile == wanted.name) return text(", tile ", tile, wanted.tuned ? " found by octet tune" : " as asked for");
  return {};
}

}  // namespace octet::cuda
