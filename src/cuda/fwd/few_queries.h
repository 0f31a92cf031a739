// The problems of few queries, whose keys sm80 splits among thread blocks, and which of them sm90 leaves to it.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/problem.h"
#include "cuda/fwd/choose.h"
#include "cuda/scheduler/key_splits.h"
#include "cuda/scheduler/query_tiles.h"

namespace octet::cuda {

// Returns the most queries that a sequence of a problem has. Lengths of packed sequences lie on the device: where no
// bound is given, one may have all tokens.
inline int64_t most_queries(const Problem& p) { return p.packed() && p.max_seqlen_q ? p.max_seqlen_q : p.tokens_q; }

// Returns the most keys that the queries of a sequence see together.
inline int64_t most_keys(const Problem& p) {
  const int64_t keys = p.max_seqlen_k ? std::min(p.max_seqlen_k, p.tokens_k) : p.tokens_k;
  if (p.packed() || p.cached()) {
    // A sequence that is shorter than the longest may see more keys through a window than the longest does.
    const bool window = p.windowed && p.left < keys && p.right < keys;
    return window ? std::min(keys, p.left + most_queries(p) + p.right) : keys;
  }
  const KeyRange seen = p.keys_of_block(0, p.tokens_q, p.tokens_q, p.tokens_k);
  return std::max<int64_t>(seen.last - seen.first, 0);
}

// The tiles of a problem whose rows are pairs of a query and one of the heads that share k and v.
struct PackedTiles {
  int heads = 1, queries = 0;  // of a tile
  int64_t count = 0;           // for packed sequences, whose lengths lie on the device, at least as many as there are
};
inline PackedTiles packed_tiles(const Problem& p, int rows) {
  if (!p.o.elements()) return {};
  PackedTiles tiles{.heads = heads_of_tile(p.group(), rows)};
  tiles.queries = rows / tiles.heads;
  tiles.count = query_tiles(p, tiles.queries, tiles.heads);
  return tiles;
}

// Returns whether sm80 can split the keys of a forward pass: it has up to 64 queries for a sequence.
inline bool can_split_keys(const Problem& p) {
  constexpr int64_t kMostQueries = 64;
  return most_queries(p) <= kMostQueries && p.o.elements() && forward_numerics(p).splits_keys();
}

// Returns whether it does, unless keys lie in pages, which it always splits: its tiles are no more than those of single
// heads, of which there are `tiles_of_heads`, or these would leave multiprocessors without work. Beyond head dim 128,
// where its tiles have half as many keys, they are at most two thirds as many.
inline bool has_few_queries(const Problem& p, const PackedTiles& tiles, int64_t tiles_of_heads,
                            int64_t multiprocessors) {
  const bool fewer =
      std::max(p.dim, p.dim_v) > 128 ? 3 * tiles.count <= 2 * tiles_of_heads : tiles.count <= tiles_of_heads;
  return can_split_keys(p) && (fewer || tiles_of_heads < multiprocessors);
}

// Returns whether sm90 leaves a forward pass of 16 bits to sm80, which splits its keys. `copies_keys`: sm90 would copy
// keys that sm80 reads as they lie.
//
// The unit of time is what a multiprocessor takes on sm90 for 128 keys of a tile of queries, of which it has one at a
// time, however few queries they have: 1.3 us at head dim 128. The constants were fitted to calls on an H200
// (docs/experiments/2026-11-30-few-queries-of-many-tiles.md).
inline bool splitting_keys_is_faster(const Problem& p, int64_t multiprocessors, bool copies_keys) {
  constexpr int kRows = 64, kFewRows = 16, kRowsOfSm90 = 128, kKeys = 128;
  constexpr double kLoad = 1.5;                         // 128 keys and their values come from memory
  constexpr double kCopy = 3.5;                         // they are copied
  constexpr double kTile = 1.9, kTileOfFewRows = 1.45;  // sm80 computes 128 keys of a tile
  // Another round of sm90 starts; keys of a cache become packed sequences, by a copy or where they lie.
  constexpr double kRound = 0.3, kCopyStart = 6, kInPlaceStart = 2.5;
  const PackedTiles tiles = packed_tiles(p, kRows);
  const int64_t tiles_of_sm90 = query_tiles(p, kRowsOfSm90);
  const bool is_default = copies_keys ? can_split_keys(p) : has_few_queries(p, tiles, tiles_of_sm90, multiprocessors);
  if (forward_numerics(p).formats.has_8bit_qk() || !is_default) return false;
  const auto of_multiprocessor = [&](int64_t count) {
    return static_cast<double>(count) / static_cast<double>(multiprocessors);
  };
  const int64_t dim = std::max(p.dim, p.dim_v), rows = std::min<int64_t>(most_queries(p), tiles.queries) * tiles.heads;
  const auto key_tiles = static_cast<double>((most_keys(p) + kKeys - 1) / kKeys);
  const double kv_heads = of_multiprocessor(p.sequence_count() * p.kv_heads);
  const double start_unit = dim <= 64 ? 1.5 : 1;  // the unit is shorter at head dim 64, where starts are not

  const auto rounds = static_cast<double>((tiles_of_sm90 + multiprocessors - 1) / multiprocessors);
  double sm90 = key_tiles * std::max(rounds, kLoad * kv_heads) + kRound * (rounds - 1) * start_unit;
  if (copies_keys)
    sm90 += key_tiles * kCopy * kv_heads + kCopyStart * start_unit;
  else if (p.cached())
    sm90 += kInPlaceStart * start_unit;

  // With few tiles sm80 splits keys, so that it also writes the splits and combines them.
  const bool splits = 4 * tiles.count < 3 * multiprocessors, few_rows = p.group() * most_queries(p) <= kFewRows;
  const double start = splits ? 2 + static_cast<double>(rows) / 24 : 1;
  const double sm80 = key_tiles * (few_rows && dim <= 128 ? kTileOfFewRows : kTile) * of_multiprocessor(tiles.count) +
                      start * start_unit;
  return sm90 >= sm80;
}

}  // namespace octet::cuda
