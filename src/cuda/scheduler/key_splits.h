// Few queries are divided among thread blocks: heads that share k and v become rows of one tile, and the keys of a tile
// are split (flash-decoding). Both depend on the shape and the device alone.
#pragma once
#include <algorithm>
#include <cmath>
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

// The costs of splits. The unit of time is that of one tile of keys of one thread block on a multiprocessor whose
// places are all taken: such a multiprocessor takes a unit for each of its places while all advance by one tile.
struct SplitCosts {
  double block;    // a thread block starts
  double round;    // a further round of thread blocks starts
  double combine;  // the splits are combined
  double split;    // what one has written is read
  double waiting;  // with one of many thread blocks a tile takes that much longer, as less hides its latencies
};

// Returns the costs of tiles of queries, with room for `room` rows and `rows` of them taken, over tiles of `keys` keys.
// Warps that share 16 rows wait for memory alone, as long as there are other thread blocks at all. The constants were
// fitted to calls on an H200 (docs/experiments/2026-11-30-few-queries-of-many-tiles.md).
inline SplitCosts split_costs(int room, int64_t rows, int keys) {
  return {.block = 1,
          .round = 10,
          .combine = 5,
          .split = 2 * static_cast<double>(rows) / keys,
          .waiting = room > 16 ? 0.55 : 0.};
}

// Returns into how many splits the keys of each tile of queries are divided. `blocks`: tiles of queries; `key_tiles`:
// tiles of keys of the longest. There are no more splits than in kMaxRounds rounds of thread blocks, which bounds the
// workspace, and none is empty where a tile of queries has `key_tiles` tiles of keys.
inline int key_splits(int64_t blocks, int64_t key_tiles, const BlockSlots& slots, const SplitCosts& costs) {
  constexpr double kAlone = 1.65;  // what a thread block takes that has a multiprocessor to itself
  const auto each = static_cast<double>(slots.each);
  const auto of_multiprocessor = [&](int64_t count) {
    return static_cast<double>(count) / static_cast<double>(slots.multiprocessors);
  };
  const auto time_of = [&](int64_t splits, int64_t tiles) {
    const int64_t all = blocks * splits, rest = all % slots.count();
    const int64_t whole_rounds = all / slots.count(), rounds = whole_rounds + (rest > 0);
    double tile = each * static_cast<double>(whole_rounds);
    if (rest) {
      // Multiprocessors that have one thread block more than others end last, but then have the memory for themselves.
      const double mean = of_multiprocessor(rest), last = (mean + std::ceil(mean)) / 2;
      tile += std::max(std::min(kAlone, each), last * (1 + costs.waiting * (each - last) / each));
    }
    const double block = costs.block + (splits > 1 ? costs.split : 0);
    return tile * static_cast<double>(tiles) + block * of_multiprocessor(all) +
           costs.round * static_cast<double>(std::max<int64_t>(rounds - 1, 0)) + (splits > 1 ? costs.combine : 0);
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
