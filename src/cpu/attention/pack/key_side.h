// KeySide holds the operands of all tiles of k and v, packed once per call and shared by all queries.
#pragma once
#include "cpu/attention/pack/seen.h"
#include "cpu/gemm/split.h"

namespace octet::cpu::OCTET_ISA {

// Sums of P v are floats for all v below this: P with its factor is at most 2^15, or over a stale maximum adds up to
// 2^10 in a step, and there are fewer than 2^31 keys.
constexpr float kLargestSummed = 0x1p80f;

// Everything that the kernels need of k and v, in the workspace.
struct KeySide {
  Word *k, *v;                         // tile: [k_words][kKeys], [v_words][v_columns], see v_at
  float* k_scale;                      // [tile][kKeys]; null without scales
  int32_t* k_correction;               // [tile][kKeys]: undoes the bias of signed A
  int32_t *k_zero, *k_sum;             // [tile][kKeys], with zero points of q or k: that of k, and the sum of its codes
  float* v_scale;                      // [tile][kKeys] with VScale::token
  int32_t* v_zero;                     // [tile][kKeys], with zero points of v
  bool* v_finite;                      // [tile]: all of v is below kLargestSummed
  bool* seen;                          // [tile][kKeys], with a mask tensor and scales
  float *k_mean, *v_mean, *v_channel;  // [sequence * kv_heads][kMaxDim]; v_channel: amax of v / v_range
  float* v_range;                      // [sequence * kv_heads], with scales of v: range_of_values
  int64_t k_words, v_words, v_columns;
  int64_t v_panel;             // columns of v that lie together; v_columns: all
  int64_t k_stride, v_stride;  // words from one tile to the next
  int64_t tiles;               // of a head, at most

  // Index of a tile, counted over all sequences, of a kv head: the tiles of a head lie one after the other.
  int64_t tile_index(int64_t head, int64_t tile) const { return head * tiles + tile; }

  // `first_tile`: of the sequence.
  SeenTokens seen_keys(const Problem& p, const Sequence& seq, int64_t g, int64_t first_tile) const {
    return {keys_of_sequence(p, seq), seen ? seen + tile_index(g, first_tile) * kKeys : nullptr};
  }

  // v lies in panels of v_panel columns (the last may have fewer): of a head, first one panel of all tiles, then the
  // next. So what the inner loop goes through many times is contiguous, and does not compete for cache sets.
  int64_t panel_width(int64_t column) const { return std::min(v_panel, v_columns - column); }
  // The words of a tile, panel_width apart, from `column` on, which begins a panel.
  Word* v_at(int64_t index, int64_t column = 0) const {
    const int64_t tile = index % tiles;
    return v + (index - tile) * v_stride + v_stride / v_columns * (tiles * column + tile * panel_width(column));
  }
};

// Returns whether tokens have scales or means, so that some could reach others.
inline bool has_scales(const ForwardNumerics& numerics) {
  return numerics.k_group || numerics.v_scale != VScale::none || numerics.smooth_k || numerics.smooth_v;
}

// Divides the workspace, with room for `parts` k and v in every tile, one below the other.
template <class Qk, class Pv>
KeySide allocate_key_side(const Problem& p, const ForwardNumerics& numerics, WorkspaceAllocator& workspace,
                          int64_t parts = 1) {
  KeySide s;
  s.tiles = key_tiles_bound(p);
  const int64_t tiles = s.tiles * p.kv_heads;
  const int64_t sides = (p.packed() ? p.cu_seqlens_q.shape[3] - 1 : p.batch) * p.kv_heads;
  s.k_words = words_of<Qk>(p.dim);
  s.v_words = words_of<Pv>(kKeys);
  s.v_columns = padded_columns(p.dim_v);
  s.v_panel = numerics.p == PFormat::exact && parts == 1 && !kSplits<Pv> ? kPanelColumns : s.v_columns;
  s.k_stride = parts * s.k_words * kKeys;
  s.v_stride = parts * s.v_words * s.v_columns;
  s.k = workspace.take<Word>(tiles * s.k_stride);
  s.v = workspace.take<Word>(tiles * s.v_stride);
  s.v_finite = workspace.take<bool>(tiles);
  s.seen = p.mask.present() && has_scales(numerics) ? workspace.take<bool>(tiles * kKeys) : nullptr;
  s.k_scale = numerics.k_group ? workspace.take<float>(tiles * kKeys) : nullptr;
  s.k_correction = kBias<Qk> ? workspace.take<int32_t>(tiles * kKeys) : nullptr;
  s.k_zero = numerics.qk_zero_points ? workspace.take<int32_t>(tiles * kKeys) : nullptr;
  s.k_sum = numerics.qk_zero_points ? workspace.take<int32_t>(tiles * kKeys) : nullptr;
  s.v_scale = numerics.v_scale == VScale::token ? workspace.take<float>(tiles * kKeys) : nullptr;
  s.v_zero = numerics.v_zero_points ? workspace.take<int32_t>(tiles * kKeys) : nullptr;
  s.k_mean = numerics.smooth_k ? workspace.take<float>(sides * kMaxDim) : nullptr;
  s.v_mean = numerics.smooth_v ? workspace.take<float>(sides * kMaxDim) : nullptr;
  s.v_channel = numerics.v_scale == VScale::channel ? workspace.take<float>(sides * kMaxDim) : nullptr;
  s.v_range = numerics.v_scale != VScale::none ? workspace.take<float>(sides) : nullptr;
  return s;
}

}  // namespace octet::cpu::OCTET_ISA
