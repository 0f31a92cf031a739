// Tests of how a few queries are divided among thread blocks. They need no GPU.
#include "cuda/scheduler/key_splits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

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

// The splits that are chosen take at most 1 % more than the fastest ones on average, and a tenth in any problem.
TEST(KeySplits, TheFastestOfWhatWasMeasured) {
  const nlohmann::json measured = nlohmann::json::parse(std::ifstream(OCTET_MEASURED_SPLITS));
  const int64_t multiprocessors = measured.at("multiprocessors");
  double lost = 0;
  int problems = 0;
  for (const nlohmann::json& x : measured.at("rows")) {
    const BlockSlots slots{multiprocessors, x.at("blocks_of_multiprocessor")};
    const int splits =
        key_splits(x.at("blocks"), x.at("key_tiles"), slots, split_costs(x.at("room"), x.at("rows"), x.at("keys")));
    const auto time_of = x.at("us").get<std::map<std::string, double>>();
    const auto found = time_of.find(std::to_string(splits));
    if (found == time_of.end()) continue;  // between two that were measured
    const auto fastest = std::min_element(time_of.begin(), time_of.end(),
                                          [](const auto& a, const auto& b) { return a.second < b.second; });
    const double loss = found->second / fastest->second - 1;
    EXPECT_LE(loss, 0.1) << x.at("problem") << ": " << splits << " splits, " << fastest->first << " are the fastest";
    lost += loss, ++problems;
  }
  EXPECT_GE(problems, 200);
  EXPECT_LE(lost, 0.01 * problems);
}

}  // namespace
}  // namespace octet::cuda
