// octet_append on caches that tests can look into.
#pragma once
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "support/cases.h"

namespace octet::test {

struct Appending {
  const char* name;
  std::vector<int64_t> lengths = {5, 0, 30};  // of the sequences before
  std::vector<int64_t> cu_seqlens{};          // of packed new tokens; empty: each sequence has as many
  int64_t tokens = 3, heads = 4, kv_heads = 2, dim = 64, dim_v = 40;
  int64_t page_size = 0;  // 0: a batch element for each sequence
  DType dtype = DType::f32, cache = DType::f32;
  bool scales = false;  // the cache is quantized per token
  Layout layout = Layout::bthd, cache_layout = Layout::bthd;
  octet_rope_style style = OCTET_ROPE_NONE;
  int64_t rope_dim = 0, rope_offset = 0;
  bool tables = false;    // of cosines and sines
  bool with_q = false;    // q is turned too
  bool in_place = false;  // into itself

  int64_t sequences() const { return static_cast<int64_t>(lengths.size()); }
  bool packed() const { return !cu_seqlens.empty(); }
  int64_t batch() const { return packed() ? 1 : sequences(); }  // of k, v and q
  int64_t new_tokens(int64_t sequence) const;
  // The rows of a sequence, [1 heads tokens dim], in a tensor of all.
  Values rows_of(const Values& all, int64_t sequence) const;
};
const std::vector<Appending>& appendings();

// Returns the sequence and the token of each new row: [sequence][token] -> (batch element or page, token in it).
std::vector<std::vector<std::array<int64_t, 2>>> places_of(const Appending& x);

// The tensors of a call, and what it makes of them.
struct Appended {
  explicit Appended(const Appending& x, Place* place = nullptr);

  Buffer k, v, q, k_cache, v_cache, k_scale, v_scale, q_turned, cosine, sine, seqused_k, block_table, cu_seqlens;
};

}  // namespace octet::test
