// Few queries are divided among thread blocks: heads that share k and v become rows of one tile, and the keys of a tile
// are split (flash-decoding). Both depend on the shape and the device alone.
#pragma once
#include <algorithm>
#include <cstdint>

namespace octet::cuda {

// Returns how many of the `group` heads that share k and v are rows of one tile of `rows` rows: the largest divisor of
// the group that has room.
inline int heads_of_tile(int64_t group, int rows) {
  int64_t heads = std::min<int64_t>(group, rows);
  while (group % heads) --heads;
  return static_cast<int>(heads);
}

constexpr int64_t kMaxKeySplits = 256, kMaxRounds = 4;

// The thread blocks that a device runs at a time.
struct BlockSlots {
  int64_t multiprocessors, each;  // each: thread blocks of a multiprocessor
  int64_t count() const { return multiprocessors * each; }
};

// Returns into how many splits the keys of each tile of queries are divided. `blocks`: tiles of queries; `key_tiles`:
// tiles of keys of the longest; `rows_of_key`: rows of a tile of queries for each key of a tile of keys. There are no
// more splits than in kMaxRounds rounds of thread blocks, which bounds the workspace, and none is empty where a tile of
// queries has `key_tiles` tiles of keys.
//
// The unit of time is what a multiprocessor takes for a tile of keys, with all thread blocks that it has places for.
// One alone takes longer than its share, as nothing hides its latencies. The constants were fitted to calls on an H200
// (docs/experiments/2026-11-30-few-queries-of-many-tiles.md).
inline int key_splits(int64_t blocks, int64_t key_tiles, const BlockSlots& slots, double rows_of_key) {
  constexpr double kAlone = 1.5;             // a tile of keys in a thread block that has a multiprocessor to itself
  constexpr double kStart = 6;               // a round of thread blocks starts
  constexpr double kCombine = 6;             // the splits are combined
  constexpr double kCombineRowsOfKey = 1.5;  // and for each row for a key, which is written and read
  const auto each = static_cast<double>(slots.each), alone = std::min(kAlone, each);
  const auto time_of = [&](int64_t splits, int64_t tiles) {
    const int64_t all = blocks * splits, rounds = all / slots.count(), rest = all % slots.count();
    const auto of_multiprocessor = [&](int64_t count) {
      return static_cast<double>(count) / static_cast<double>(slots.multiprocessors);
    };
    double tile = static_cast<double>(rounds) * each, starts = static_cast<double>(rounds);
    if (rest) {
      const double beside = std::max(of_multiprocessor(rest) - 1, 0.) / std::max(each - 1, 1.);
      tile += alone + (each - alone) * beside, ++starts;
    }
    const double combine = splits > 1 ? kCombine + kCombineRowsOfKey * rows_of_key * of_multiprocessor(all) : 0;
    return tile * static_cast<double>(tiles) + kStart * starts + combine;
  };
  const int64_t most = std::min({key_tiles, kMaxKeySplits, kMaxRounds * slots.count() / std::max<int64_t>(blocks, 1)});
  int64_t best = 1;
  double least = time_of(1, key_tiles);
  for (int64_t splits = 2; splits <= most; ++splits) {
    const int64_t tiles = (key_tiles + splits - 1) / splits;
    if ((splits - 1) * tiles >= key_tiles) continue;  // the last split would be empty
    if (time_of(splits, tiles) < least) best = splits, least = time_of(splits, tiles);
  }
  return static_cast<int>(best);
}

}  // namespace octet::cuda
