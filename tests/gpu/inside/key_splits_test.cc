// Tests of how a few queries are divided among thread blocks. They need no GPU.
#include "cuda/scheduler/key_splits.h"

#include <gtest/gtest.h>

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

TEST(KeySplits, NoPartIsEmpty) {
  for (const int blocks : {1, 7, 8, 64, 300, 5000})
    for (int tiles = 1; tiles <= 3000; tiles = tiles * 5 / 4 + 1) {
      const int splits = key_splits(blocks, tiles, 396), of_a_split = (tiles + splits - 1) / splits;
      EXPECT_GE(splits, 1);
      EXPECT_LE(splits, kMaxKeySplits);
      EXPECT_LE(splits == 1 ? 0 : blocks * splits, kMaxRounds * 396);
      EXPECT_LT((splits - 1) * of_a_split, tiles) << blocks << " blocks, " << tiles << " tiles";
    }
}

// Decoding with 8 heads of k and v and 32k keys: all but a few of the thread blocks that run at a time have work.
TEST(KeySplits, LongKeysFillTheDevice) {
  for (const int blocks : {2, 8, 32, 64}) {
    const int splits = key_splits(blocks, 1024, 396);
    EXPECT_LE(blocks * splits, 396) << blocks;
    EXPECT_GT(blocks * splits, 396 * 8 / 10) << blocks;
  }
}

TEST(KeySplits, KeysStayTogetherWhereThatIsFaster) {
  EXPECT_EQ(key_splits(396, 1024, 396), 1);   // the device is full
  EXPECT_EQ(key_splits(4000, 1024, 396), 1);  // and ten times so
  EXPECT_EQ(key_splits(8, 1, 396), 1);        // there is nothing to split
  EXPECT_EQ(key_splits(8, 0, 396), 1);
}

// One thread block more than run at a time would double the time.
TEST(KeySplits, AFewBlocksTooManyAreSplit) { EXPECT_GT(key_splits(400, 1024, 396), 1); }

}  // namespace
}  // namespace octet::cuda
