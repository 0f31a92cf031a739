// The problems of few queries, whose keys sm80 splits among thread blocks, and which of them sm90 leaves to it.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/problem.h"
#include "core/recipe.h"
#include "cuda/scheduler/query_tiles.h"

namespace octet::cuda {

// Returns the most queries that a sequence of a problem has. Lengths of packed sequences lie on the device: where no
// bound is given, one may have all tokens.
inline int64_t most_queries(const Problem& p) { return p.packed() && p.max_seqlen_q ? p.max_seqlen_q : p.tokens_q; }

// Returns the most keys that the queries of a sequence see together.
inline int64_t most_keys(const Problem& p) {
  if (p.packed()) return p.max_seqlen_k ? p.max_seqlen_k : p.tokens_k;
  const octet::KeyRange seen = p.keys_of_block(0, p.tokens_q, p.tokens_q, p.tokens_k);
  return std::max<int64_t>(seen.last - seen.first, 0);
}

// Returns whether P and v are f16 although the operands are bf16, as bias correction f16 has them where the unrounded o
// is kept.
inline bool f16_compute(const Problem& p) {
  return p.precision == OCTET_PRECISION_BF16 && p.bias_correction == OCTET_BIAS_CORRECTION_F16 && keeps_exact_o(p);
}

inline bool shifts_maximum(const Problem& p) { return p.bias_correction == OCTET_BIAS_CORRECTION_BETA; }

// Returns whether sm80 has instances for a forward pass that split its keys among thread blocks.
inline bool has_few_queries(const Problem& p) {
  constexpr int64_t kMostQueries = 64;
  return most_queries(p) <= kMostQueries && p.o.elements() && !f16_compute(p) && !shifts_maximum(p);
}

// Returns whether sm90 leaves a forward pass that both backends compute to sm80: few queries over keys enough to be
// worth splitting, where a thread block of sm90 for each head of a sequence would leave half of the multiprocessors
// idle.
inline bool splitting_keys_is_faster(const Problem& p, int64_t multiprocessors) {
  constexpr int64_t kManyKeys = 1024;
  constexpr int kRows = 128;  // of the smallest tile of sm90
  return has_few_queries(p) && most_keys(p) >= kManyKeys && 2 * query_tiles(p, kRows) <= multiprocessors;
}

}  // namespace octet::cuda
