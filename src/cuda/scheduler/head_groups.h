// The order in which blocks of unequal length are drawn, as a causal mask makes them: of the heads of a section the
// longest blocks first, so that short ones even out what long ones leave, then the next section. As many heads are a
// section as share L2.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace octet::cuda {

struct HeadGroups {
  int heads;  // of each section but the last
  int count;  // head_groups before the last, which has all heads that are left

  // A block of a head, counted from the longest.
  struct Tile {
    unsigned head, block;
  };
  // Of the number drawn, where each of `all` heads has `blocks`.
  __host__ __device__ Tile tile_of(unsigned number, unsigned blocks, unsigned all) const {
    const unsigned width = heads, before = count, by_width = number / (blocks * width);
    const unsigned section = by_width < before ? by_width : before, first = section * width;
    const unsigned here = section < before ? width : all - first, rest = number - first * blocks;
    return {first + rest % here, rest / here};
  }
};

// Of `all` heads of so many blocks, of which `sharing` share L2, for so many thread blocks. These end together if the
// last section has short blocks enough for all that wait for the end of its long ones: some 1.5 blocks for each thread
// block under a causal mask, where the mean block takes half as long as the longest.
inline HeadGroups head_groups_of(int64_t all, int64_t blocks, int64_t sharing, int64_t thread_blocks) {
  const int64_t heads = std::clamp<int64_t>(sharing, 1, std::max<int64_t>(all, 1));
  const int64_t last = std::max(heads, (3 * thread_blocks / 2 + blocks - 1) / std::max<int64_t>(blocks, 1));
  return {static_cast<int>(heads), static_cast<int>(std::max<int64_t>(all - last, 0) / heads)};
}
// Where all blocks are alike: head after head.
inline HeadGroups one_by_one(int64_t all) { return {1, static_cast<int>(all)}; }

}  // namespace octet::cuda
