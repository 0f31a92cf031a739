// The order in which thread blocks draw blocks. Needs no GPU.
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

std::vector<HeadGroups::Tile> places(const HeadGroups& head_groups, int all, int blocks) {
  std::vector<HeadGroups::Tile> places(all * blocks);
  for (int i = 0; i < all * blocks; ++i) places[i] = head_groups.tile_of(i, blocks, all);
  return places;
}

// When the last thread block ends; a block takes a scale for each that comes after it in its head, and one.
int end_of(const std::vector<HeadGroups::Tile>& places, const Shape& shape) {
  std::priority_queue<int, std::vector<int>, std::greater<>> ends(std::greater<>{},
                                                                  std::vector<int>(shape.thread_blocks));
  int last = 0;
  for (const HeadGroups::Tile& place : places) {
    const int end = ends.top() + shape.blocks - static_cast<int>(place.block);
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
      unsigned first = 0, end = 0, block = 0;  // heads of this section; the last block
      for (const auto& place : places(head_groups, all, shape.blocks)) {
        ASSERT_LT(place.head, all);
        ASSERT_LT(place.block, shape.blocks);
        ++seen[place.head * shape.blocks + place.block];
        if (place.head >= end) {
          ASSERT_EQ(place.block, 0);
          first = end, block = 0;
          end = first / head_groups.heads < static_cast<unsigned>(head_groups.count) ? first + head_groups.heads : all;
        }
        ASSERT_GE(place.head, first);
        ASSERT_GE(place.block, block);
        block = place.block;
      }
      ASSERT_EQ(std::count(seen.begin(), seen.end(), 1), all * shape.blocks);
    }
}

TEST(HeadGroups, EndLittleLaterThanAllHeadsTogether) {
  for (const Shape& shape : kShapes)
    for (int all = 1; all < 200; ++all) {
      const HeadGroups together{all, 0};
      const int least = end_of(places(together, all, shape.blocks), shape);
      const HeadGroups head_groups = head_groups_of(all, shape.blocks, shape.sharing, shape.thread_blocks);
      EXPECT_LE(end_of(places(head_groups, all, shape.blocks), shape), 1.1 * least)
          << all << " heads of " << shape.blocks << " blocks";
    }
}

TEST(HeadGroups, AreHeadsWhereBlocksAreAlike) {
  for (int number = 0; number < 70; ++number) {
    const auto place = one_by_one(10).tile_of(number, 7, 10);
    EXPECT_EQ(place.head, number / 7);
    EXPECT_EQ(place.block, number % 7);
  }
}

}  // namespace
}  // namespace octet::cuda::sm90
