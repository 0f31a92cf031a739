// Problems of packed sequences whose keys lie in a KV cache instead.
#pragma once
#include <string>
#include <vector>

#include "support/cases.h"

namespace octet::test {

// How k and v of packed sequences lie in a cache.
struct CacheLayout {
  int64_t page_size = 16;     // 0: no pages, but a batch element for each sequence
  bool packed_q = true;       // false: q is a batch element for each sequence, which all have as many queries
  Layout kv = Layout::bhtd;   // of a page
  int64_t max_seqlen_k = 0;   // what the call says
  int64_t spare_columns = 1;  // of the block table, behind those of the longest sequence
  DType codes = DType::none;  // k and v are quantized per token
};

// k and v of the packed sequences of a case in a cache, with their lengths. Pages come in an order drawn from a seed,
// equal ones once. What no query may read is poison: NaN in pages, pages that there are not in the block table.
struct Cache {
  Cache(const Case& c, const Inputs& in, const CacheLayout& how, uint64_t seed);

  Buffer k, v, k_scale, v_scale, seqused_k, block_table;
  int64_t pages = 0;  // of all sequences, each counted once
};

// The forward pass of a case of packed sequences, whose keys lie in a cache, as run() gives it. `explained`: gets what
// octet_explain says of it.
Outputs run_cached(const Case& c, const Inputs& in, const Attention& attention, const CacheLayout& how, uint64_t seed,
                   Place* place = nullptr, std::string* explained = nullptr);

// The inputs of a case with k and v as the numbers that their codes in a cache stand for.
Inputs as_cached(const Inputs& in, const CacheLayout& how);

// A random problem of packed sequences, and how their keys lie in a cache.
struct RandomCache {
  Case c;
  Inputs in, numbers;  // numbers: as_cached
  Attention attention;
  CacheLayout how;
};
RandomCache random_cache(uint64_t seed);

}  // namespace octet::test
