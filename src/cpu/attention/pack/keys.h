// One tile of k and v: rows smoothed, rotated, scaled, rounded, and laid out in words.
#pragma once
#include "cpu/attention/pack/int8.h"
#include "cpu/attention/pack/key_side.h"
#include "cpu/attention/pack/words.h"

namespace octet::cpu::OCTET_ISA {

// A tile's place in the caller's tensors and in KeySide.
struct KeyTile {
  const Sequence& seq;
  int64_t g, token;     // head of k and v; first token in their tensors
  int64_t side, index;  // of the head and of the tile in KeySide
  int64_t valid;        // tokens within the sequence
  bool seen[kKeys];     // false for a key that no query sees, which becomes zeros with a scale of 0

  KeyTile(const Problem& p, const ForwardNumerics& numerics, const Sequence& seq, const Block& block, const KeySide& s)
      : seq(seq),
        g(block.head),
        token(seq.k_first + block.token),
        side(block.sequence * p.kv_heads + g),
        index(s.tile_index(g, block.first_tile + block.token / kKeys)),
        valid(std::min(seq.k_tokens - block.token, kKeys)) {
    const SeenTokens all_seen = s.seen_keys(p, seq, g, block.first_tile);
    for (int64_t r = 0; r < valid; ++r) seen[r] = !has_scales(numerics) || all_seen[block.token + r];
  }

  void zero_unseen(float* rows, int64_t width) const {
    for (int64_t r = 0; r < valid; ++r)
      if (!seen[r]) std::memset(rows + r * width, 0, sizeof(float) * static_cast<std::size_t>(width));
  }
  void clear_unseen(float* scales) const {
    for (int64_t r = 0; r < valid; ++r) scales[r] = seen[r] ? scales[r] : 0.f;
  }
};

// Rows of k, kKeys of `width` floats, as the numbers of the recipe's format, and their scales.
inline void round_keys(const Problem& p, const ForwardNumerics& numerics, const KeyTile& tile, const Signs& signs,
                       const float* mean, int64_t width, float* rows, float* scales) {
  const int64_t valid = tile.valid;
  if (numerics.k_group == 1 && !numerics.k_prequantized) {
    for (int64_t r = 0; r < valid; ++r)
      scales[r] = quantize_row(p.k, tile.seq.batch, tile.g, tile.token + r, numerics.qk, mean,
                               numerics.hadamard ? signs.sign : nullptr, width, rows + r * width);
    std::memset(rows + valid * width, 0, sizeof(float) * static_cast<std::size_t>((kKeys - valid) * width));
    return;
  }
  load_operand(p.k, numerics.k_prequantized, tile.seq.batch, tile.g, tile.token, valid, kKeys, width, rows);
  for (int64_t r = 0; r < valid && !numerics.k_prequantized; ++r) {
    if (numerics.smooth_k) subtract(rows + r * width, mean, p.dim);
    if (numerics.hadamard) hadamard_row(rows + r * width, signs.sign, p.dim);
  }
  tile.zero_unseen(rows, width);
  if (numerics.k_prequantized)
    for (int64_t r = 0; r < valid; ++r) scales[r] = prequantized_scale(p.k, tile.seq.batch, tile.g, tile.token + r);
  else
    quantize_rows(numerics.qk, numerics.smooth_k || numerics.hadamard ? OCTET_F32 : numbers_of(p.k), numerics.k_group,
                  rows, valid, width, scales);
}

// Rows of k to [k_words][kKeys].
template <class Qk>
void store_keys(const Problem& p, const KeySide& s, const float* rows, int64_t width, Word* k, int32_t* correction) {
#ifdef __AMX_BF16__
  if constexpr (kSplits<Qk>) {
    alignas(64) float columns[kMaxDim * kKeys];
    transpose(rows, kKeys, width, p.dim, columns);
    return split_columns(columns, p.dim, p.dim, kKeys, k);
  }
#endif
  if constexpr (std::is_same_v<Qk, F32>) return transpose(rows, kKeys, width, p.dim, reinterpret_cast<float*>(k));
  alignas(64) Word words[kMaxDim + 64];
  for (int64_t r = 0; r < kKeys; ++r) {
    encode_row<Qk>(rows + r * width, s.k_words * Qk::kPerWord, 0, words);
    for (int64_t w = 0; w < s.k_words; ++w) k[w * kKeys + r] = words[w];
    if constexpr (kBias<Qk> != 0) {
      int32_t sum = 0;
      for (int64_t c = 0; c < p.dim; ++c) sum += static_cast<int32_t>(rows[r * width + c]);
      correction[r] = -kBias<Qk> * sum;
    }
  }
}

// The zero points of the tokens of a tile; 0 for those that are not seen, whose rows are zeros.
inline void store_zero_points(const View& t, const KeyTile& tile, int32_t* out) {
  std::fill_n(out, kKeys, 0);
  load_zero_points(t, tile.seq.batch, tile.g, tile.token, tile.valid, out);
  for (int64_t r = 0; r < tile.valid; ++r) out[r] = tile.seen[r] ? out[r] : 0;
}

template <class Qk>
void pack_k_tile(const Problem& p, const ForwardNumerics& numerics, const KeyTile& tile, const Signs& signs,
                 const KeySide& s, float* rows) {
  float scales[kKeys] = {};
  const int64_t width = padded<Qk>(padded_columns(p.dim));
  const float* mean = numerics.smooth_k ? s.k_mean + tile.side * kMaxDim : nullptr;
  Word* k = s.k + tile.index * s.k_stride;
  int32_t* correction = s.k_correction ? s.k_correction + tile.index * kKeys : nullptr;
  if (in_bytes<Qk>(numerics.qk) && numerics.k_group == 1 && !numerics.k_prequantized) {
    pack_int8_keys<Qk>(p.k, tile.seq.batch, tile.g, tile.token, tile.valid, mean,
                       numerics.hadamard ? signs.sign : nullptr, s.k_words, k, correction, scales);
  } else {
    round_keys(p, numerics, tile, signs, mean, width, rows, scales);
    store_keys<Qk>(p, s, rows, width, k, correction);
    if (s.k_zero) {
      store_zero_points(p.k, tile, s.k_zero + tile.index * kKeys);
      for (int64_t r = 0; r < kKeys; ++r) s.k_sum[tile.index * kKeys + r] = sum_of_codes(rows + r * width, p.dim);
    }
  }
  tile.clear_unseen(scales);
  if (s.k_scale) std::memcpy(s.k_scale + tile.index * kKeys, scales, sizeof scales);
}

// Rows of v, kKeys of v_columns floats, as the numbers of the recipe's format, and their scales, where they do not come
// from single tokens. Returns whether p v is a float for all of them.
inline bool round_values(const Problem& p, const ForwardNumerics& numerics, const KeyTile& tile, const KeySide& s,
                         const float* v_mean, float v_range, float* rows, float* scales) {
  const int64_t columns = s.v_columns, valid = tile.valid;
  load_operand(p.v, numerics.v_prequantized, tile.seq.batch, tile.g, tile.token, valid, kKeys, columns, rows);
  tile.zero_unseen(rows, columns);
  const auto divide = [&](float* x, int64_t n) {
    for (int64_t i = 0; i < n && v_range != 1.f; ++i) x[i] *= 1.f / v_range;
  };
  const auto products_are_finite = [&] { return row_amax(rows, kKeys * columns) < kLargestSummed; };
  divide(rows, valid * columns);
  const bool finite = products_are_finite();
  if (numerics.smooth_v && !numerics.v_prequantized) {
    alignas(64) float mean[kMaxDim];
    std::copy(v_mean, v_mean + p.dim_v, mean);
    divide(mean, p.dim_v);
    for (int64_t r = 0; r < valid; ++r)
      if (tile.seen[r]) subtract(rows + r * columns, mean, p.dim_v);
  }
  if (numerics.v_prequantized) {
    for (int64_t r = 0; r < valid; ++r) scales[r] = prequantized_scale(p.v, tile.seq.batch, tile.g, tile.token + r);
  } else if (s.v_channel) {
    float inverse[kMaxDim] = {};
    for (int64_t c = 0; c < p.dim_v; ++c)
      inverse[c] = scale_of(s.v_channel[tile.side * kMaxDim + c], largest_quantized(numerics.v)).inverse;
    for (int64_t r = 0; r < valid; ++r)
      for (int64_t c = 0; c < p.dim_v; ++c) {
        float& x = rows[r * columns + c];
        x *= inverse[c];
        x += x - x;  // infinity becomes NaN: e4m3 has no other name for it
      }
    quantize_rows(numerics.v, OCTET_F32, 0, rows, valid, columns, scales);
  } else if (numerics.v_scale == VScale::power_of_two) {
    for (int64_t i = 0; i < valid * columns; i += kLanes) store(rows + i, round_11_bits(load(rows + i)));
  } else {
    quantize_rows(numerics.v, numerics.smooth_v ? OCTET_F32 : numbers_of(p.v),
                  numerics.v_scale == VScale::token ? numerics.v_group : 0, rows, valid, columns, scales);
    if (numerics.v == OCTET_F16) return products_are_finite();  // f16 has infinities of its own
  }
  return finite;
}

// Rows of v, which lie at `rows` unless `in_place`, to [v_words][v_columns] in panels.
template <class Pv>
void store_values(const KeySide& s, int64_t index, [[maybe_unused]] bool finite, bool in_place, float* rows) {
  const int64_t columns = s.v_columns;
#ifdef __AMX_BF16__
  if constexpr (kSplits<Pv>) {
    if (!finite)
      for (int64_t i = 0; i < kKeys * columns; ++i) rows[i] = splits(rows[i]) ? rows[i] : 0.f;
    return split_columns(rows, kKeys, kKeys, columns, s.v_at(index));
  }
#endif
  if constexpr (Pv::kPerWord > 1) {
    Word* v = s.v_at(index);
    for (int64_t w = 0; w < s.v_words; ++w)
      interleave_rows<Pv>(rows + w * Pv::kPerWord * columns, columns, columns, v + w * columns);
  }
  for (int64_t c = 0; c < columns && Pv::kPerWord == 1 && !in_place; c += s.v_panel) {
    const int64_t width = s.panel_width(c);
    for (int64_t r = 0; r < kKeys; ++r)
      std::memcpy(s.v_at(index, c) + r * width, rows + r * columns + c, sizeof(float) * width);
  }
}

template <class Pv>
void pack_v_tile(const Problem& p, const ForwardNumerics& numerics, const KeyTile& tile, const KeySide& s,
                 float* buffer) {
  float scales[kKeys] = {};
  const int64_t columns = s.v_columns, valid = tile.valid;
  const float* mean = numerics.smooth_v ? s.v_mean + tile.side * kMaxDim : nullptr;
  const float v_range = s.v_range ? s.v_range[tile.side] : 1.f;
  const bool by_token =
      numerics.v_scale == VScale::token && numerics.v_group == 1 && !numerics.v_prequantized && v_range == 1.f;
  const bool bytes = in_bytes<Pv>(numerics.v) && by_token;
  // Words of one float lie as the rows do, unless in panels.
  const bool in_place = Pv::kPerWord == 1 && !kSplits<Pv> && s.v_panel == columns;
  float* rows = in_place ? reinterpret_cast<float*>(s.v_at(tile.index)) : buffer;
  bool finite = true;
  if (bytes) {
    pack_int8_values(p.v, tile.seq.batch, tile.g, tile.token, valid, mean, columns, s.v_at(tile.index), scales);
  } else if (by_token) {
    for (int64_t r = 0; r < valid; ++r)
      scales[r] = quantize_row(p.v, tile.seq.batch, tile.g, tile.token + r, numerics.v, mean, nullptr, columns,
                               rows + r * columns);
    std::memset(rows + valid * columns, 0, sizeof(float) * static_cast<std::size_t>((kKeys - valid) * columns));
  } else {
    finite = round_values(p, numerics, tile, s, mean, v_range, rows, scales);
  }
  if (s.v_scale) {
    tile.clear_unseen(scales);
    for (int64_t r = 0; r < valid; ++r) finite &= scales[r] == scales[r];
    for (int64_t r = valid; r < kKeys; ++r) scales[r] = 0.f;
    std::memcpy(s.v_scale + tile.index * kKeys, scales, sizeof scales);
  }
  s.v_finite[tile.index] = finite;
  if (s.v_zero) store_zero_points(p.v, tile, s.v_zero + tile.index * kKeys);
  if (!bytes) store_values<Pv>(s, tile.index, finite, in_place, rows);
}

// Packs one tile of k and v.
template <class Qk, class Pv>
void pack_key_tile(const Problem& p, const ForwardNumerics& numerics, const Sequence& seq, const Block& block,
                   const Signs& signs, const KeySide& s) {
  alignas(64) float rows[kKeys * kMaxDim];
  const KeyTile tile(p, numerics, seq, block, s);
  pack_k_tile<Qk>(p, numerics, tile, signs, s, rows);
  pack_v_tile<Pv>(p, numerics, tile, s, rows);
}

}  // namespace octet::cpu::OCTET_ISA
