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

TEST(KeySplits, NoPartIsEmpty) {
  for (const int blocks : {1, 7, 8, 64, 300, 5000})
    for (int tiles = 1; tiles <= 3000; tiles = tiles * 5 / 4 + 1) {
      const int splits = key_splits(blocks, tiles, kSlots, 1.), of_a_split = (tiles + splits - 1) / splits;
      EXPECT_GE(splits, 1);
      EXPECT_LE(splits, kMaxKeySplits);
      EXPECT_LE(splits == 1 ? 0 : blocks * splits, kMaxRounds * kSlots.count());
      EXPECT_LT((splits - 1) * of_a_split, tiles) << blocks << " blocks, " << tiles << " tiles";
    }
}

// Decoding with 8 heads of k and v and 32k keys: the thread blocks fill the multiprocessors, in one round.
TEST(KeySplits, LongKeysFillTheDevice) {
  for (const int blocks : {2, 8, 32, 64}) {
    const int splits = key_splits(blocks, 1024, kSlots, 1.);
    EXPECT_LE(blocks * splits, kSlots.count()) << blocks;
    EXPECT_GE(blocks * splits, 3 * kSlots.multiprocessors / 2) << blocks;
  }
}

TEST(KeySplits, KeysStayTogetherWhereThatIsFaster) {
  EXPECT_EQ(key_splits(396, 1024, kSlots, 1.), 1);   // the device is full
  EXPECT_EQ(key_splits(4000, 1024, kSlots, 1.), 1);  // and ten times so
  EXPECT_EQ(key_splits(8, 1, kSlots, 1.), 1);        // there is nothing to split
  EXPECT_EQ(key_splits(8, 0, kSlots, 1.), 1);
}

// A thread block more than run at a time would have the device to itself, for as long as the others took.
TEST(KeySplits, AFewBlocksTooManyAreSplit) { EXPECT_GT(key_splits(400, 1024, kSlots, .1), 1); }

struct MeasuredSplits {
  int blocks, key_tiles, rows, keys;
  std::map<int, double> time;  // microseconds by splits
};

// On an H200, in bf16: the choice costs at most a twelfth of the time.
TEST(KeySplits, TheFastestOfWhatWasMeasured) {
  const MeasuredSplits all[] = {
      {512, 128, 32, 32, {{1, 314.5}, {2, 280.6}, {3, 273.5}, {4, 297.4}}},
      {8, 16, 64, 32, {{1, 18.4}, {2, 14.3}, {3, 13}, {4, 11.8}, {6, 11.5}, {8, 11.1}, {16, 11.1}}},
      {32, 4, 64, 32, {{1, 9.2}, {2, 10.1}, {3, 10.7}, {4, 10.7}}},
      {32, 32, 64, 32, {{1, 31.5}, {2, 21.5}, {3, 17.9}, {4, 16.3}, {6, 17.5}, {8, 17.5}, {16, 29.2}}},
      {128, 8, 64, 32, {{1, 12.9}, {2, 18}, {3, 19.1}, {4, 24.1}, {6, 27.6}, {8, 37.4}}},
      {128, 64, 64, 32, {{1, 58.2}, {2, 50.6}, {3, 50.1}, {4, 67.8}, {6, 62}, {8, 71.9}, {16, 114.8}}},
      {512, 16, 64, 32, {{1, 57.5}, {2, 78.6}, {3, 88.4}, {4, 100.7}, {6, 126.7}, {8, 151.3}, {16, 341.8}}},
      {128, 2, 1, 64, {{1, 7.7}, {2, 9.7}}},
      {128, 16, 1, 64, {{1, 25.2}, {2, 24.5}, {3, 24.5}, {4, 28.7}, {6, 29.5}, {8, 32.9}, {16, 41.6}}},
      {512, 4, 1, 64, {{1, 25.7}, {2, 31.2}, {3, 34.3}, {4, 41.5}}},
      {512, 32, 1, 64, {{1, 134.8}, {2, 132.6}, {3, 134.9}, {4, 137.4}, {6, 140.5}, {8, 143.1}, {16, 164.5}}},
      {8, 8, 4, 64, {{1, 11.2}, {2, 10.4}, {3, 9.9}, {4, 9.5}, {6, 10.1}, {8, 9.8}}},
      {8,
       64,
       4,
       64,
       {{1, 50.7},
        {2, 30.1},
        {3, 23.3},
        {4, 19.4},
        {5, 17.6},
        {6, 16.5},
        {8, 14.8},
        {12, 12.7},
        {16, 11.7},
        {24, 11.6},
        {32, 11.2}}},
      {32, 4, 4, 64, {{1, 8.6}, {2, 9.6}, {3, 9.8}, {4, 9.6}}},
      {32, 32, 4, 64, {{1, 28.5}, {2, 19.8}, {3, 16.5}, {4, 14.7}, {6, 15.1}, {8, 15}, {16, 18.4}}},
      {128, 2, 4, 64, {{1, 7.7}, {2, 10}}},
      {128, 16, 4, 64, {{1, 25}, {2, 24.8}, {3, 25.2}, {4, 29}, {6, 30.5}, {8, 33.3}, {16, 42.4}}},
      {256, 64, 4, 64, {{1, 122.6}, {2, 137.1}, {3, 130.1}, {4, 133.2}, {5, 138.7}, {6, 136.3}, {8, 141.4}}},
      {512, 4, 4, 64, {{1, 26}, {2, 32.3}, {3, 35.3}, {4, 42.6}}},
      {512, 32, 4, 64, {{1, 136.2}, {2, 135.2}, {3, 138.5}, {4, 142.3}, {6, 146.4}, {8, 149}, {16, 182.1}}},
      {1024, 32, 4, 64, {{1, 241.4}, {2, 255.8}}},
      {128, 2, 16, 64, {{1, 7.8}, {2, 10.5}, {3, 10.7}, {4, 13.7}}},
      {128, 16, 16, 64, {{1, 25.6}, {2, 25.8}, {3, 26.2}, {4, 30.8}, {6, 31.7}, {8, 35.6}, {16, 51.9}}},
      {512, 4, 16, 64, {{1, 26.8}, {2, 35.5}, {3, 40.1}, {4, 47.9}, {6, 59.1}, {8, 71.6}}},
      {512, 32, 16, 64, {{1, 136.6}, {2, 139.8}, {3, 145.2}, {4, 151.5}, {6, 157.7}, {8, 163.9}, {16, 217.4}}},
      {128, 2, 1, 128, {{1, 6.9}, {2, 8.9}, {3, 9}, {4, 10.3}}},
      {128, 16, 1, 128, {{1, 24.5}, {2, 23.4}, {3, 23.5}, {4, 26.8}, {6, 27.1}, {8, 29.4}, {16, 36.3}}},
      {512, 4, 1, 128, {{1, 24.4}, {2, 28.1}, {3, 30.4}, {4, 36.1}, {6, 43}, {8, 50.6}}},
      {8, 1, 4, 128, {{1, 5.5}, {2, 7.3}}},
      {8, 8, 4, 128, {{1, 10.4}, {2, 9.5}, {3, 9.1}, {4, 8.7}, {6, 9.1}, {8, 8.9}, {16, 8.4}}},
      {32, 2, 4, 128, {{1, 6.4}, {2, 8}, {3, 8.2}, {4, 8.4}}},
      {32, 16, 4, 128, {{1, 16.2}, {2, 12.9}, {3, 11.8}, {4, 10.9}, {6, 11.3}, {8, 11.3}, {16, 14.2}}},
      {128, 4, 4, 128, {{1, 8.3}, {2, 10.3}, {3, 10.4}, {4, 14.2}, {6, 15.8}, {8, 16.9}}},
      {512, 1, 4, 128, {{1, 11.6}, {2, 16.6}}},
      {512, 8, 4, 128, {{1, 40.6}, {2, 43.5}, {3, 46.6}, {4, 47.7}, {6, 53.9}, {8, 65.6}, {16, 99.2}}},
      {8, 4, 64, 32, {{1, 8.9}, {2, 9.5}, {3, 9.7}, {4, 9.4}}},
      {32, 16, 64, 32, {{1, 18.7}, {2, 15}, {3, 13.9}, {4, 13.1}, {6, 14}, {8, 15}, {16, 26.9}}},
      {512, 4, 64, 32, {{1, 22.9}, {2, 48.4}, {3, 60.9}, {4, 77.9}}},
      {128, 8, 1, 64, {{1, 12.1}, {2, 13.6}, {3, 13.2}, {4, 18.2}, {6, 19.2}, {8, 23.1}}},
      {8, 4, 4, 64, {{1, 8.4}, {2, 9}, {3, 9.2}, {4, 8.8}}},
      {32, 16, 4, 64, {{1, 17.2}, {2, 13.8}, {3, 12.7}, {4, 11.8}, {6, 12.1}, {8, 12.3}, {16, 15.8}}},
      {512, 8, 4, 64, {{1, 42.3}, {2, 46.9}, {3, 51}, {4, 53.4}, {6, 62.4}, {8, 76}}},
      {128, 8, 16, 64, {{1, 12.1}, {2, 14.2}, {3, 15}, {4, 19.3}, {6, 21.1}, {8, 26.3}, {16, 44.2}}},
      {512, 16, 16, 64, {{1, 74.7}, {2, 81.8}, {3, 85.8}, {4, 89}, {6, 97.3}, {8, 106}, {16, 180.1}}},
      {512, 2, 1, 128, {{1, 14.2}, {2, 19.5}, {3, 22}, {4, 26.8}}},
      {8, 2, 4, 128, {{1, 6.2}, {2, 7.3}, {3, 7.6}, {4, 7.8}}},
      {32, 4, 4, 128, {{1, 7.8}, {2, 8.7}, {3, 9}, {4, 8.6}, {6, 8.9}, {8, 9.1}}},
      {128, 8, 4, 128, {{1, 11.1}, {2, 12.8}, {3, 12.8}, {4, 16.7}, {6, 17.9}, {8, 20.9}, {16, 28.1}}},
      {512, 4, 4, 128, {{1, 24.5}, {2, 28.9}, {3, 30.9}, {4, 37.2}, {6, 43.8}, {8, 51.5}}},
  };
  int measured = 0;
  for (const MeasuredSplits& x : all) {
    const int splits = key_splits(x.blocks, x.key_tiles, kSlots, static_cast<double>(x.rows) / x.keys);
    const auto fastest = std::min_element(x.time.begin(), x.time.end(),
                                          [](const auto& a, const auto& b) { return a.second < b.second; });
    const auto found = x.time.find(splits);
    if (found == x.time.end()) continue;  // between two that were measured
    ++measured;
    EXPECT_LE(found->second, 13. / 12 * fastest->second)
        << x.blocks << " blocks of " << x.rows << " rows, " << x.key_tiles << " tiles of " << x.keys
        << " keys: " << splits << " splits, " << fastest->first << " were the fastest";
  }
  EXPECT_GE(measured, 40);
}

}  // namespace
}  // namespace octet::cuda
