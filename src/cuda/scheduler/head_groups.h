// The order in which blocks of unequal length, as a causal mask makes them, are scheduled. A group is heads that share
// L2. Within a group the longest blocks come first (LPT order), so that short ones fill the gaps that long ones leave;
// then the next group follows.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace octet::cuda {

struct HeadGroups {
  int heads;  // of each group but the last
  int count;  // groups before the last, which has all heads that are left

  // A block of a head, counted from the longest.
  struct Tile {
    unsigned head, block;
  };
  // Returns the tile with a number of the order, where each of `all` heads has `blocks` blocks.
  __host__ __device__ Tile tile_of(unsigned number, unsigned blocks, unsigned all) const {
    const unsigned width = heads, before = count, group_of_width = number / (blocks * width);
    const unsigned group = group_of_width < before ? group_of_width : before, first = group * width;
    const unsigned in_group = group < before ? width : all - first, rest = number - first * blocks;
    return {first + rest % in_group, rest / in_group};
  }
};

// Returns the groups of `all` heads of `blocks` blocks each, of which `in_l2` heads fit in L2, for `thread_blocks`
// thread blocks. These end together if the last group has enough short blocks for all that wait for the end of its long
// ones: about 1.5 blocks for each thread block under a causal mask, where the mean block takes half as long as the
// longest.
inline HeadGroups head_groups_of(int64_t all, int64_t blocks, int64_t in_l2, int64_t thread_blocks) {
  const int64_t heads = std::clamp<int64_t>(in_l2, 1, std::max<int64_t>(all, 1));
  const int64_t last = std::max(heads, (3 * thread_blocks / 2 + blocks - 1) / std::max<int64_t>(blocks, 1));
  return {static_cast<int>(heads), static_cast<int>(std::max<int64_t>(all - last, 0) / heads)};
}
// The order where all blocks are alike: head after head.
inline HeadGroups one_by_one(int64_t all) { return {1, static_cast<int>(all)}; }

}  // namespace octet::cuda
