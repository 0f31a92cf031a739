// The two axes along which the kernels of a precision and a head dim differ, in all passes.
#pragma once

namespace octet::cuda::sm80 {

// The terms of the logits.
enum class Logits : int {
  plain,   // scale q.k
  masked,  // scale q.k and a mask tensor, whose rows start at multiples of 16 bytes
  general  // scale q.k and any of softcap, ALiBi and mask tensor; forward also with a shifted maximum
};

// The meaning of the rows of a tile.
enum class TileRows : int {
  queries,       // the queries of one head
  half_queries,  // the same, half as many: for short sequences, and where two thread blocks would not fit 99 KB
  pairs,         // pairs of a query and one of the heads that share k and v: few queries over many keys, in splits
  pages,         // the same where k and v lie in the pages of a KV cache
  few_pairs,     // up to 16 pairs; each of the four warps has its part of the keys
  few_pages,     // the same in pages
  doubled        // queries of one head again; two tiles of keys at a time
};

constexpr bool in_pages(TileRows rows) { return rows == TileRows::pages || rows == TileRows::few_pages; }
constexpr bool has_pairs(TileRows rows) {
  return rows == TileRows::pairs || rows == TileRows::few_pairs || in_pages(rows);
}
// Returns whether there are kernels for head dims up to 128 alone.
constexpr bool has_small_dims(TileRows rows) {
  return rows == TileRows::half_queries || rows == TileRows::doubled || rows == TileRows::few_pairs ||
         rows == TileRows::few_pages;
}

}  // namespace octet::cuda::sm80
