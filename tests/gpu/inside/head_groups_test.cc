// Tests of the order in which thread blocks take blocks of queries or keys. They need no GPU.
#include "cuda/scheduler/head_groups.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <queue>
#include <string>
#include <vector>

namespace octet::cuda::sm90 {
namespace {

struct Shape {
  int blocks, sharing, thread_blocks;
};
// Of 128 keys: 4k, 2k, 8k, 16k, 1k tokens; at head dim 256; of queries.
constexpr Shape kShapes[] = {{32, 4, 132}, {16, 8, 132}, {64, 2, 132},  {128, 1, 132},
                             {8, 16, 132}, {32, 2, 66},  {32, 16, 132}, {1, 1, 132}};

std::vector<HeadGroups::Tile> tiles(const HeadGroups& head_groups, int all, int blocks) {
  std::vector<HeadGroups::Tile> tiles(all * blocks);
  for (int i = 0; i < all * blocks; ++i) tiles[i] = head_groups.tile_of(i, blocks, all);
  return tiles;
}

// Returns the time at which the last thread block ends, where a block takes as many steps as it and the blocks after it
// in its head are.
int end_of(const std::vector<HeadGroups::Tile>& tiles, const Shape& shape) {
  std::priority_queue<int, std::vector<int>, std::greater<>> ends(std::greater<>{},
                                                                  std::vector<int>(shape.thread_blocks));
  int last = 0;
  for (const HeadGroups::Tile& tile : tiles) {
    const int end = ends.top() + shape.blocks - static_cast<int>(tile.block);
    ends.pop(), ends.push(end), last = std::max(last, end);
  }
  return last;
}

TEST(HeadGroups, NumberEveryBlockOnce) {
  for (const Shape& shape : kShapes)
    for (int all = 1; all < 200; ++all) {
      const HeadGroups head_groups = head_groups_of(all, shape.blocks, shape.sharing, shape.thread_blocks);
      SCOPED_TRACE(std::to_string(all) + " heads of " + std::to_string(shape.blocks));
      std::vector<int> seen(all * shape.blocks);
      unsigned first = 0, end = 0, block = 0;  // heads of this group; the last block
      for (const auto& tile : tiles(head_groups, all, shape.blocks)) {
        ASSERT_LT(tile.head, all);
        ASSERT_LT(tile.block, shape.blocks);
        ++seen[tile.head * shape.blocks + tile.block];
        if (tile.head >= end) {
          ASSERT_EQ(tile.block, 0);
          first = end, block = 0;
          end = first / head_groups.heads < static_cast<unsigned>(head_groups.count) ? first + head_groups.heads : all;
        }
        ASSERT_GE(tile.head, first);
        ASSERT_GE(tile.block, block);
        block = tile.block;
      }
      ASSERT_EQ(std::count(seen.begin(), seen.end(), 1), all * shape.blocks);
    }
}

TEST(HeadGroups, EndLittleLaterThanAllHeadsTogether) {
  for (const Shape& shape : kShapes)
    for (int all = 1; all < 200; ++all) {
      const HeadGroups together{all, 0};
      const int least = end_of(tiles(together, all, shape.blocks), shape);
      const HeadGroups head_groups = head_groups_of(all, shape.blocks, shape.sharing, shape.thread_blocks);
      EXPECT_LE(end_of(tiles(head_groups, all, shape.blocks), shape), 1.1 * least)
          << all << " heads of " << shape.blocks << " blocks";
    }
}

TEST(HeadGroups, AreHeadsWhereBlocksAreAlike) {
  for (int number = 0; number < 70; ++number) {
    const auto tile = one_by_one(10).tile_of(number, 7, 10);
    EXPECT_EQ(tile.head, number / 7);
    EXPECT_EQ(tile.block, number % 7);
  }
}

}  // namespace
}  // namespace octet::cuda::sm90
