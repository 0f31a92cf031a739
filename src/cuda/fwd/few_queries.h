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

// Returns whether it does: one tile holds the queries of a whole group of heads, or tiles of a single head, of which
// there are `tiles_of_heads`, would leave multiprocessors without work.
inline bool has_few_queries(const Problem& p, const PackedTiles& tiles, int64_t tiles_of_heads,
                            int64_t multiprocessors) {
  return can_split_keys(p) && (most_queries(p) <= tiles.queries || tiles_of_heads < multiprocessors);
}

// Returns whether sm90 leaves a forward pass of 16 bits to sm80, which splits its keys.
//
// The time of sm90 for 128 keys is one for each round of thread blocks, of which a multiprocessor has one, however few
// queries they have. In that time sm80 computes as many of its tiles as there are 2/3 multiprocessors; it takes as long
// as two to four such times more to start, and to write and combine the splits of up to 64 rows.
inline bool splitting_keys_is_faster(const Problem& p, int64_t multiprocessors) {
  constexpr int kRows = 64, kRowsOfSm90 = 128, kKeys = 128;
  const PackedTiles tiles = packed_tiles(p, kRows);
  const int64_t tiles_of_sm90 = query_tiles(p, kRowsOfSm90);
  if (forward_numerics(p).formats.has_8bit_qk() || !has_few_queries(p, tiles, tiles_of_sm90, multiprocessors))
    return false;
  const int64_t rounds = (tiles_of_sm90 + multiprocessors - 1) / multiprocessors;
  const int64_t rows = std::min<int64_t>(most_queries(p), tiles.queries) * tiles.heads;
  const int64_t key_tiles = (most_keys(p) + kKeys - 1) / kKeys;
  return key_tiles * (2 * rounds * multiprocessors - 3 * tiles.count) >= (4 + rows / 8) * multiprocessors;
}

}  // namespace octet::cuda
