// Tests of how a few queries are divided among thread blocks. They need no GPU.
#include "cuda/scheduler/key_splits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

namespace octet::cuda {
namespace {

TEST(KeySplits, HeadsOfATileDivideTheirGroup) {
  for (const int rows : {32, 64})
    for (int group = 1; group <= 256; ++group) {
      const int heads = heads_of_tile(group, rows);
      EXPECT_EQ(group % heads, 0) << group;
      EXPECT_LE(heads, rows) << group;
      for (int more = heads + 1; more <= rows; ++more) EXPECT_NE(group % more, 0) << group << ": " << more << " fit";
    }
}

constexpr BlockSlots kSlots{132, 3};  // of an H200, with a kernel of 64 KB of shared memory
constexpr SplitCosts kCosts{.block = 0.5, .round = 6, .combine = 5, .split = 0.1, .waiting = 0};

TEST(KeySplits, NoPartIsEmpty) {
  for (const int blocks : {1, 7, 8, 64, 300, 5000})
    for (int tiles = 1; tiles <= 3000; tiles = tiles * 5 / 4 + 1) {
      const int splits = key_splits(blocks, tiles, kSlots, kCosts), of_a_split = (tiles + splits - 1) / splits;
      EXPECT_GE(splits, 1);
      EXPECT_LE(splits, kMaxKeySplits);
      EXPECT_LE(splits == 1 ? 0 : blocks * splits, kMaxRounds * kSlots.count());
      EXPECT_LT((splits - 1) * of_a_split, tiles) << blocks << " blocks, " << tiles << " tiles";
    }
}

// Decoding with 8 heads of k and v and 32k keys: the thread blocks fill the multiprocessors, in one round.
TEST(KeySplits, LongKeysFillTheDevice) {
  for (const int blocks : {2, 8, 32, 64}) {
    const int splits = key_splits(blocks, 1024, kSlots, kCosts);
    EXPECT_LE(blocks * splits, kSlots.count()) << blocks;
    EXPECT_GE(blocks * splits, 3 * kSlots.multiprocessors / 2) << blocks;
  }
}

TEST(KeySplits, KeysStayTogetherWhereThatIsFaster) {
  EXPECT_EQ(key_splits(396, 1024, kSlots, kCosts), 1);   // the device is full
  EXPECT_EQ(key_splits(4000, 1024, kSlots, kCosts), 1);  // and ten times so
  EXPECT_EQ(key_splits(8, 1, kSlots, kCosts), 1);        // there is nothing to split
  EXPECT_EQ(key_splits(8, 0, kSlots, kCosts), 1);
}

// A thread block more than run at a time would have the device to itself, for as long as the others took.
TEST(KeySplits, AFewBlocksTooManyAreSplit) { EXPECT_GT(key_splits(400, 1024, kSlots, kCosts), 1); }

struct MeasuredSplits {
  int room, rows, keys;  // of a tile
  int each;              // thread blocks of a multiprocessor
  int blocks, key_tiles;
  std::map<int, double> time;  // microseconds by splits
};

// On an H200, in bf16, but for tiles of 128 keys at 3 thread blocks, which are those of int8 pages: the choice costs at
// most a tenth of the time.
TEST(KeySplits, TheFastestOfWhatWasMeasured) {
  const MeasuredSplits all[] = {
      {16,
       4,
       128,
       3,
       8,
       32,
       {{1, 54.6},
        {2, 35.4},
        {3, 26.9},
        {4, 22.1},
        {6, 19.7},
        {8, 17.2},
        {12, 15.1},
        {16, 14},
        {24, 14.3},
        {32, 13.5}}},
      {16, 4, 128, 3, 384, 32, {{1, 103.2}, {2, 114.8}, {3, 121.2}, {4, 129.5}}},
      {16, 8, 128, 3, 320, 64, {{1, 125}, {2, 122.7}, {3, 119.3}, {4, 121.4}, {6, 129.3}}},
      {16, 1, 64, 4, 512, 32, {{1, 126}, {2, 131}, {3, 132.8}}},
      {16,
       4,
       64,
       4,
       8,
       32,
       {{1, 29.9},
        {2, 19.8},
        {3, 16.2},
        {4, 14.2},
        {6, 13.2},
        {8, 12.2},
        {12, 10.6},
        {16, 10.1},
        {24, 10},
        {32, 10.1}}},
      {16,
       4,
       64,
       4,
       32,
       16,
       {{1, 17.9}, {2, 14.2}, {3, 12.9}, {4, 11.8}, {6, 12.2}, {8, 12.1}, {12, 11.1}, {16, 11.9}}},
      {16, 4, 64, 4, 64, 8, {{1, 11.9}, {2, 11.5}, {3, 11.3}, {4, 11.3}, {6, 11.5}, {8, 13}}},
      {16, 4, 64, 4, 128, 4, {{1, 9.2}, {2, 11}, {3, 11}, {4, 12.6}}},
      {16, 4, 64, 4, 320, 2, {{1, 8.8}, {2, 15.7}}},
      {16, 4, 64, 4, 320, 256, {{1, 597.8}, {2, 661.3}, {3, 613.4}, {4, 620.5}}},
      {16, 4, 64, 4, 512, 64, {{1, 244.6}, {2, 251.1}, {3, 253}}},
      {16, 16, 64, 4, 32, 4, {{1, 8.8}, {2, 9.7}, {3, 10}, {4, 9.7}}},
      {16, 16, 64, 4, 128, 8, {{1, 12.3}, {2, 13.8}, {3, 15.1}, {4, 15.6}, {6, 18.9}, {8, 22}}},
      {16, 16, 64, 4, 512, 16, {{1, 68.4}, {2, 79.2}, {3, 84.4}}},
      {16, 1, 128, 4, 512, 32, {{1, 124.5}, {2, 128.9}, {3, 129.8}}},
      {16,
       4,
       128,
       4,
       8,
       32,
       {{1, 27}, {2, 17.7}, {3, 14.6}, {4, 12.8}, {6, 11.9}, {8, 10.9}, {12, 9.6}, {16, 9.1}, {24, 9.1}, {32, 9}}},
      {16,
       4,
       128,
       4,
       32,
       32,
       {{1, 27.2},
        {2, 19.5},
        {3, 15.9},
        {4, 13.6},
        {6, 14.2},
        {8, 13.3},
        {12, 12.9},
        {16, 13.2},
        {24, 15.3},
        {32, 16.6}}},
      {16,
       4,
       128,
       4,
       64,
       32,
       {{1, 36.2}, {2, 27}, {3, 24.6}, {4, 23.8}, {6, 24.4}, {8, 25.3}, {12, 27.5}, {16, 27.5}, {24, 29.9}}},
      {16, 4, 128, 4, 128, 32, {{1, 42.4}, {2, 38.6}, {3, 38.6}, {4, 39.4}, {6, 43.7}, {8, 44.7}, {12, 44.5}}},
      {16, 4, 128, 4, 320, 32, {{1, 80.9}, {2, 92.6}, {3, 87}, {4, 89.3}}},
      {16, 4, 128, 4, 512, 32, {{1, 125.1}, {2, 131.3}, {3, 132.6}}},
      {16,
       16,
       128,
       4,
       8,
       128,
       {{1, 101.9},
        {2, 54.1},
        {3, 39},
        {4, 31.7},
        {6, 24.5},
        {8, 20.8},
        {12, 16.2},
        {16, 13.6},
        {24, 14.1},
        {32, 13.1},
        {64, 13.8}}},
      {16, 16, 128, 4, 128, 2, {{1, 6.8}, {2, 9.2}}},
      {16, 16, 128, 4, 512, 4, {{1, 21.8}, {2, 30.8}, {3, 34.1}}},
      {64, 64, 32, 3, 128, 256, {{2, 176}, {3, 149.7}}},
      {64, 32, 32, 3, 512, 128, {{1, 314.5}, {2, 280.6}, {3, 273.5}, {4, 297.4}}},
      {64, 64, 32, 3, 8, 8, {{1, 12.1}, {2, 11.1}, {3, 10.6}, {4, 10.2}, {6, 10.7}, {8, 10.3}}},
      {64, 64, 32, 3, 8, 32, {{1, 30.9}, {2, 20.7}, {3, 16.9}, {4, 14.9}, {6, 13.8}, {8, 12.7}, {16, 11.8}}},
      {64, 64, 32, 3, 32, 4, {{1, 9.2}, {2, 10.1}, {3, 10.7}, {4, 10.7}}},
      {64, 64, 32, 3, 32, 16, {{1, 18.7}, {2, 15}, {3, 13.9}, {4, 13.1}, {6, 14}, {8, 15}, {16, 26.9}}},
      {64, 64, 32, 3, 32, 64, {{1, 56.6}, {2, 34.2}, {3, 26.8}, {4, 22.8}, {6, 23.4}, {8, 22}, {16, 35}}},
      {64, 64, 32, 3, 128, 8, {{1, 12.9}, {2, 18}, {3, 19.1}, {4, 24.1}, {6, 27.6}, {8, 37.4}}},
      {64, 64, 32, 3, 128, 32, {{1, 32.9}, {2, 32.4}, {3, 34}, {4, 43.5}, {6, 43.5}, {8, 52.5}, {16, 98.9}}},
      {64, 64, 32, 3, 128, 256, {{2, 176}, {3, 149.7}}},
      {64, 64, 32, 3, 512, 8, {{1, 36.7}, {2, 59.2}, {3, 71.1}, {4, 84.9}, {6, 108.3}, {8, 138.6}}},
      {64, 64, 32, 3, 512, 32, {{1, 99.5}, {2, 114.3}, {3, 124.1}, {4, 137.7}, {6, 157.1}, {8, 184.6}, {16, 371.9}}},
      {64, 64, 32, 3, 8, 256, {{20, 26.1}, {32, 22}, {43, 22.2}}},
      {64, 64, 64, 3, 8, 128, {{19, 17.5}, {32, 14.9}, {43, 15.2}}},
      {64, 17, 64, 3, 160, 64, {{2, 51.3}, {4, 59.1}}},
      {64, 64, 64, 3, 100, 64, {{3, 43.3}, {5, 50.5}}},
      {64, 63, 32, 3, 80, 128, {{4, 58.4}, {8, 65.8}}},
      {64, 32, 32, 3, 16, 64, {{11, 15.4}, {22, 14}}},
  };
  int measured = 0;
  for (const MeasuredSplits& x : all) {
    const int splits =
        key_splits(x.blocks, x.key_tiles, {kSlots.multiprocessors, x.each}, split_costs(x.room, x.rows, x.keys));
    const auto fastest = std::min_element(x.time.begin(), x.time.end(),
                                          [](const auto& a, const auto& b) { return a.second < b.second; });
    const auto found = x.time.find(splits);
    if (found == x.time.end()) continue;  // between two that were measured
    ++measured;
    EXPECT_LE(found->second, 1.1 * fastest->second)
        << x.blocks << " blocks of " << x.rows << " rows, " << x.key_tiles << " tiles of " << x.keys
        << " keys: " << splits << " splits, " << fastest->first << " were the fastest";
  }
  EXPECT_GE(measured, 30);
}

}  // namespace
}  // namespace octet::cuda
