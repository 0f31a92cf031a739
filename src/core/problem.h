// A problem: the arguments of one call after they have been validated. Everything behind the C ABI works on
// this and trusts it.
#pragma once
#include <octet/octet.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "core/dropout.h"
#include "core/tensor.h"

namespace octet {

// The largest head dim that any backend takes.
constexpr int64_t kMostHeadDim = 512;

// The keys a query sees: [first, last). Every positional mask is one such interval per query.
struct KeyRange {
  int64_t first, last;
};

// One run of tokens that attend to each other: a batch element, or one of the packed sequences.
struct Sequence {
  int64_t batch;
  int64_t q_first, q_tokens;
  int64_t k_first, k_tokens;
  int64_t index;  // among the sequences of the call
};

// The tile of the kernel that shall run, by its name.
struct WantedTile {
  const char* name;     // null: the default one
  const char* backend;  // whose tile it is; null: that of any backend that has one of this name
  bool tuned;           // octet tune found it; else the caller asks for it, and no other kernel may run
};

struct Problem {
  octet_pass pass;
  octet_precision precision;
  octet_bias_correction bias_correction;
  float beta;
  float scale;    // never 0
  float softcap;  // 0: none
  bool hadamard, smooth_q;
  bool deterministic;
  unsigned threads;                // 0: all
  const octet_rounding* rounding;  // null: the precision's own
  uint32_t dropout;                // the probability of dropout times kDropoutOne; 0: none
  WantedTile tile;

  int64_t batch, heads, kv_heads, tokens_q, tokens_k, dim, dim_v;    // tokens_k: of pages those of a sequence, at most
  int64_t group() const { return kv_heads ? heads / kv_heads : 1; }  // heads of q per head of k and v

  octet_device device;
  int32_t device_index;

  View q, k, v, mask, sinks, alibi_slopes, dropout_seed, cu_seqlens_q,
      cu_seqlens_k;  // by head or sequence: stride 0 where shared
  View seqused_k, block_table;
  // i32 [1, 1, sequence, key]: of keys that a backend has packed, the places among all keys, by which dropout counts
  // them (cuda/operands/key_mask.h); else absent
  View key_places;
  View o, o_residual, lse, do_, dlse, dq, dk, dv, dsinks, dmask, tq, tk, tv, tsinks, to, tlse;
  int64_t max_seqlen_q, max_seqlen_k;

  bool windowed;  // the three below hold
  bool bottom_right;
  int64_t left, right;  // keys seen left and right of the diagonal; kUnbounded: all

  static constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max() / 4;

  bool packed() const { return cu_seqlens_q.present(); }
  bool cached() const { return seqused_k.present(); }
  int64_t sequence_count() const { return packed() ? cu_seqlens_q.shape[3] - 1 : batch; }

  // Returns the factor of the elements of P that are kept, 1 / (1 - p).
  double dropout_scale() const { return 1.0 / (1.0 - dropout / static_cast<double>(kDropoutOne)); }

  // The random numbers that decide what is dropped in head `h` of a sequence; reads dropout_seed.
  DropoutStream dropout_stream(const Sequence& seq, int64_t h) const;

  // Returns whether logits are scale * q.k and nothing else.
  bool plain_logits() const { return !softcap && !alibi_slopes.present() && !mask.present(); }

  // The keys that query `i` of a sequence of n queries and m keys sees. Empty ranges have first == last.
  KeyRange keys_of(int64_t i, int64_t n, int64_t m) const;

  // The distances of query i from the keys [first, last) that ALiBi multiplies by a slope; 0 from none.
  struct Distances {
    int64_t least, most;
  };
  static Distances distances_of(int64_t i, int64_t n, int64_t m, KeyRange keys);

  // The keys that any of the queries [i, i + rows) sees: the hull of their ranges.
  KeyRange keys_of_block(int64_t i, int64_t rows, int64_t n, int64_t m) const;
};

// The sequences of a problem on the CPU; reads cu_seqlens, and the lengths and the block table of cached keys. Throws
// Failure if cu_seqlens are not ascending or do not end at the token counts, and if keys lie outside of the cache. None
// if no output has an element.
std::vector<Sequence> sequences(const Problem& problem);

}  // namespace octet
