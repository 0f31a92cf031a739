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

// Returns into how many splits the keys of each tile of queries are divided. `blocks`: tiles of queries; `key_tiles`:
// tiles of keys of the longest; `slots`: thread blocks that the device runs at a time. There are no more splits than in
// kMaxRounds rounds of thread blocks, which bounds the workspace, and none is empty where a tile of queries has
// `key_tiles` tiles of keys.
inline int key_splits(int64_t blocks, int64_t key_tiles, int64_t slots) {
  // The time that a thread block takes to start, and to write and combine its split, as a number of tiles of keys.
  constexpr int64_t kStart = 4;
  const auto time_of = [&](int64_t splits, int64_t tiles) {
    return (blocks * splits + slots - 1) / slots * (tiles + kStart);
  };
  const int64_t most = std::min({key_tiles, kMaxKeySplits, kMaxRounds * slots / std::max<int64_t>(blocks, 1)});
  int64_t best = 1, least = time_of(1, key_tiles);
  for (int64_t splits = 2; splits <= most; ++splits) {
    const int64_t tiles = (key_tiles + splits - 1) / splits;
    if ((splits - 1) * tiles >= key_tiles) continue;  // the last split would be empty
    if (time_of(splits, tiles) < least) best = splits, least = time_of(splits, tiles);
  }
  return static_cast<int>(best);
}

}  // namespace octet::cuda
