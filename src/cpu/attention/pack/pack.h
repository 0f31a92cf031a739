// Operands for the kernels: rows smoothed, rotated, scaled, rounded, and laid out in words (matmul.h).
//
// K and V are prepared once per call, tile by tile, and shared by all queries; Q once per block of queries.
#pragma once
#include <algorithm>
#include <cmath>

#include "cpu/attention/pack/pack_int8.h"
#include "cpu/attention/pack/seen.h"
#include "cpu/attention/plan.h"
#include "cpu/gemm/matmul.h"
#include "cpu/gemm/split.h"

namespace octet::cpu::OCTET_ISA {

// [padded_columns(dim)] numbers.
inline void hadamard_row(float* x, const float* signs, int64_t dim) {
  with_vectors(dim, [&](int n) OCTET_INLINE_LAMBDA {
    const int count = static_cast<int>(padded_columns(dim)) / kLanes;
    RowVectors y;
    for (int v = 0; v < n; ++v) y[v] = v < count ? load(x + v * kLanes) : Vf{};
    hadamard(y, n, signs, dim);
    for (int v = 0; v < count; ++v) store(x + v * kLanes, y[v]);
  });
}

// octet::amax; n a multiple of kLanes.
OCTET_INLINE float row_amax(const float* x, int64_t n) {
  Vi largest{};
  for (int64_t c = 0; c < n; c += kLanes) largest = max(bits(load(x + c)) & 0x7fffffff, largest);
  const int32_t top = reduce_max(largest);
  float amax;
  std::memcpy(&amax, &top, sizeof amax);
  return amax;
}

// Rounds x to the numbers of a float format, or x / step to its codes when there is a scale; `inverse`: 1 / step.
static inline void round_row_to(octet_dtype dtype, float inverse, float* x, int64_t n) {
  for (int64_t c = 0; c < n; c += kLanes) {
    const Vf y = load(x + c);
    switch (dtype) {
      case OCTET_I8:
        store(x + c, round_int8(y, inverse));
        break;
      case OCTET_E4M3:
        store(x + c, round_e4m3(y * inverse));
        break;
      case OCTET_F16:
        store(x + c, round_f16(y * inverse));
        break;
      case OCTET_BF16:
        store(x + c, round_bf16(y * inverse));
        break;
      default:
        store(x + c, y * inverse);
        break;
    }
  }
}

// The words of one row of A (or one column of B): codes as elements of the engine, plus its bias for signed A.
template <class E>
inline void encode_row(const float* x, int64_t n, int bias, Word* words) {
  auto* out = reinterpret_cast<typename E::Element*>(words);
  if constexpr (std::is_same_v<typename E::Element, float>) {
    for (int64_t c = 0; c < n; ++c) out[c] = x[c];
  } else if constexpr (std::is_same_v<typename E::Element, uint16_t>) {
    const auto* i = reinterpret_cast<const uint32_t*>(x);
    for (int64_t c = 0; c < n; ++c) out[c] = static_cast<uint16_t>(i[c] >> 16);
  } else {
    for (int64_t c = 0; c < n; ++c) out[c] = static_cast<uint8_t>(static_cast<int32_t>(x[c]) + bias);
  }
}

// Word rows of B from kPerWord rows of floats.
template <class E>
inline void interleave_rows(const float* rows, int64_t stride, int64_t columns, Word* out) {
  if constexpr (E::kPerWord == 1) {
    for (int64_t c = 0; c < columns; ++c) std::memcpy(out + c, rows + c, 4);
  } else if constexpr (E::kPerWord == 2) {
    const auto* i = reinterpret_cast<const uint32_t*>(rows);
    for (int64_t c = 0; c < columns; ++c) out[c] = i[c] >> 16 | (i[c + stride] & 0xffff0000u);
  } else {
    const auto byte = [&](int64_t r, int64_t c) {
      return static_cast<uint32_t>(static_cast<int32_t>(rows[r * stride + c])) & 0xffu;
    };
    for (int64_t c = 0; c < columns; ++c) out[c] = byte(0, c) | byte(1, c) << 8 | byte(2, c) << 16 | byte(3, c) << 24;
  }
}

// Signs of the Hadamard rotation of q and k: those of q if it came quantised.
struct Signs {
  float sign[kMaxDim];
  Signs(const View& q, int64_t dim) : Signs(q.quantization ? q.quantization->hadamard_seed : kHadamardSeed, dim) {}
  Signs(uint64_t seed, int64_t dim) {
    for (int64_t c = 0; c < kMaxDim; ++c) sign[c] = c < dim ? hadamard_sign(seed, c) : 0.f;
  }
};

// Everything the kernels need of k and v, in the workspace.
struct KeySide {
  Word *k, *v;                         // tile: [k_words][kKeys], [v_words][v_columns], see v_at
  float* k_scale;                      // [tile][kKeys]; null without scales
  int32_t* k_correction;               // [tile][kKeys]: undoes the bias of signed A
  float* v_scale;                      // [tile][kKeys] with VScale::token
  bool* v_finite;                      // [tile]: all of v is below 2^100: p v is a float even where p is above 1
  bool* seen;                          // [tile][kKeys], with a mask tensor and scales
  float *k_mean, *v_mean, *v_channel;  // [sequence * kv_heads][kMaxDim]; v_channel: amax, in units of v_unit
  float* v_unit;                       // [sequence * kv_heads], with scales of v; see size_of_unit
  int64_t k_words, v_words, v_columns;
  int64_t v_panel;             // columns of v that lie together; v_columns: all
  int64_t k_stride, v_stride;  // words from one tile to the next
  int64_t tiles;               // of a head, at most

  // Index of a tile, counted over all sequences, of a kv head: the tiles of a head lie one after the other.
  int64_t tile_index(int64_t head, int64_t tile) const { return head * tiles + tile; }

  // `first_tile`: of the sequence.
  SeenTokens seen_keys(const Problem& p, const Sequence& seq, int64_t g, int64_t first_tile) const {
    return {keys_in_reach(p, seq), seen ? seen + tile_index(g, first_tile) * kKeys : nullptr};
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

OCTET_INLINE Vf finite_magnitude(Vf x) {
  const Vf a = floats(bits(x) & 0x7fffffff);
  return a < splat(__builtin_inff()) ? a : Vf{};
}

inline float finite_amax(const float* x, int64_t n) {
  Vf largest{};
  for (int64_t c = 0; c < n; c += kLanes) largest = max(finite_magnitude(load(x + c)), largest);
  return reduce_max(largest);
}

// mean_limit of a sample of the seen tokens of a head of k or v.
inline float limit_of(const View& t, const Sequence& seq, int64_t g, const SeenTokens& seen) {
  alignas(64) float row[kMaxDim];
  float largest[kSampledTokens];
  int64_t sampled = 0;
  const int64_t width = padded_columns(t.shape[3]);
  seen.for_sample([&](int64_t token) {
    load_numbers(t, seq.batch, g, seq.k_first + token, 1, 1, width, row);
    largest[sampled++] = finite_amax(row, width);
  });
  return mean_limit(largest, sampled);
}

// Returns whether tokens have scales or means, so that some could reach others.
inline bool has_scales(const ForwardPlan& plan) {
  return plan.k_group || plan.v_scale != VScale::none || plan.smooth_k || plan.smooth_v;
}

// With room for `parts` k and v in every tile, one below the other.
template <class Qk, class Pv>
KeySide allocate_key_side(const Problem& p, const ForwardPlan& plan, WorkspaceAllocator& workspace, int64_t parts = 1) {
  KeySide s;
  s.tiles = tiles_bound(p, p.tokens_k, kKeys);
  const int64_t tiles = s.tiles * p.kv_heads;
  const int64_t sides = (p.packed() ? p.cu_seqlens_q.shape[3] - 1 : p.batch) * p.kv_heads;
  s.k_words = words_of<Qk>(p.dim);
  s.v_words = words_of<Pv>(kKeys);
  s.v_columns = padded_columns(p.dim_v);
  s.v_panel = plan.p == PFormat::exact && parts == 1 && !kSplits<Pv> ? kPanelColumns : s.v_columns;
  s.k_stride = parts * s.k_words * kKeys;
  s.v_stride = parts * s.v_words * s.v_columns;
  s.k = workspace.take<Word>(tiles * s.k_stride);
  s.v = workspace.take<Word>(tiles * s.v_stride);
  s.v_finite = workspace.take<bool>(tiles);
  s.seen = p.mask.present() && has_scales(plan) ? workspace.take<bool>(tiles * kKeys) : nullptr;
  s.k_scale = plan.k_group ? workspace.take<float>(tiles * kKeys) : nullptr;
  s.k_correction = kBias<Qk> ? workspace.take<int32_t>(tiles * kKeys) : nullptr;
  s.v_scale = plan.v_scale == VScale::token ? workspace.take<float>(tiles * kKeys) : nullptr;
  s.k_mean = plan.smooth_k ? workspace.take<float>(sides * kMaxDim) : nullptr;
  s.v_mean = plan.smooth_v ? workspace.take<float>(sides * kMaxDim) : nullptr;
  s.v_channel = plan.v_scale == VScale::channel ? workspace.take<float>(sides * kMaxDim) : nullptr;
  s.v_unit = plan.v_scale != VScale::none ? workspace.take<float>(sides) : nullptr;
  return s;
}

// Steps below 2^-110 have no inverse, and products of large steps no room. Values that are all small or all large, as
// the exponent of `limit` says (mean_limit), are divided by a power of two, which o gets back; others by 1.
inline float size_of_unit(float limit) {
  if (limit == 0.f) return 1.f;
  const int exponent = limit < __builtin_inff() ? std::ilogb(limit) : 128;
  return std::abs(exponent) < 64 ? 1.f : std::ldexp(1.f, std::clamp(exponent, -126, 126));
}

// Channel means of k, and of v with its channel amax, over the seen tokens of one sequence and head; in token order, in
// double, rounded once. Any mean is correct, and a token must not reach queries that do not see it: mean_limit.
inline void channel_statistics(const Problem& p, const ForwardPlan& plan, const Sequence& seq, int64_t g, int64_t side,
                               const SeenTokens& seen, const KeySide& s) {
  const auto tokens = static_cast<double>(std::max<int64_t>(seen.count(), 1));
  const auto for_seen = [&](auto&& body) OCTET_INLINE_LAMBDA {
    for (int64_t j = seen.range.first; j < seen.range.last; ++j)
      if (seen[j]) body(seq.k_first + j);
  };
  const auto mean_of = [&](const View& t, bool coded, int64_t n, float* mean) {
    std::memset(mean, 0, sizeof(float) * kMaxDim);
    if (coded) {
      for (int64_t c = 0; c < n; ++c) mean[c] = given_mean(t, seq.batch, g, c);
      return;
    }
    alignas(64) double sum[kMaxDim];
    const float limit = limit_of(t, seq, g, seen);
    with_vectors(n, [&](int vectors) OCTET_INLINE_LAMBDA {
      RowVectors x;
      Doubles sums[kMaxDim / kLanes] = {};
      for_seen([&](int64_t token) OCTET_INLINE_LAMBDA {
        load_numbers_row(t, seq.batch, g, token, x, vectors);
        for (int v = 0; v < vectors; ++v) sums[v].add(floats(bits(x[v]) & 0x7fffffff) < splat(limit) ? x[v] : Vf{});
      });
      for (int v = 0; v < vectors; ++v) sums[v].store(sum + v * kLanes);
    });
    for (int64_t c = 0; c < n; ++c) mean[c] = static_cast<float>(sum[c] / tokens);
  };
  if (plan.smooth_k) mean_of(p.k, plan.k_coded, p.dim, s.k_mean + side * kMaxDim);
  if (plan.smooth_v) mean_of(p.v, plan.v_coded, p.dim_v, s.v_mean + side * kMaxDim);
  if (s.v_unit) s.v_unit[side] = plan.v_coded ? 1.f : size_of_unit(limit_of(p.v, seq, g, seen));
  if (plan.v_scale == VScale::channel) {
    float* top = s.v_channel + side * kMaxDim;
    float row[kMaxDim];
    for (int64_t c = 0; c < p.dim_v; ++c) top[c] = 0.f;
    for_seen([&](int64_t token) {
      load_numbers(p.v, seq.batch, g, token, 1, 1, p.dim_v, row);
      for (int64_t c = 0; c < p.dim_v; ++c) {
        const float a = __builtin_fabsf(row[c]);
        top[c] = a > top[c] && a < __builtin_inff() ? a : top[c];
      }
    });
    for (int64_t c = 0; c < p.dim_v; ++c) top[c] *= 1.f / s.v_unit[side];
  }
}

inline void subtract(float* row, const float* mean, int64_t n) {
  for (int64_t c = 0; c < n; ++c) row[c] -= mean[c];
}

// Rounds `valid` rows of a tile to `dtype`, one scale for each `group` of them (0: no scale; or kThreadGroups), steps
// into `steps`. A row that is not finite gets the step NaN and does not count for its group. `came`: the type that the
// numbers have already.
inline void quantize_rows(octet_dtype dtype, octet_dtype came, int64_t group, float* rows, int64_t valid, int64_t width,
                          float* steps) {
  if (!group) {
    if (dtype == OCTET_F32 || dtype == came) return;
    for (int64_t r = 0; r < valid; ++r) round_row_to(dtype, 1.f, rows + r * width, width);
    return;
  }
  const auto group_of = [&](int64_t r) { return group == kThreadGroups ? thread_group_k(r) : r / group; };
  float largest[kKeys] = {};
  for (int64_t r = 0; r < valid; ++r) {
    steps[r] = row_amax(rows + r * width, width);
    float& of_group = largest[group_of(r)];
    of_group = steps[r] > of_group && steps[r] < __builtin_inff() ? steps[r] : of_group;
  }
  for (int64_t r = 0; r < valid; ++r) {
    const Step step = step_of(largest[group_of(r)], largest_code(dtype));
    round_row_to(dtype, step.inverse, rows + r * width, width);
    steps[r] = steps[r] < __builtin_inff() ? step.step : __builtin_nanf("");
  }
}

// Prepares one key tile.
template <class Qk, class Pv>
void pack_key_tile(const Problem& p, const ForwardPlan& plan, const Sequence& seq, const Block& block,
                   const Signs& signs, const KeySide& s) {
  const int64_t g = block.head, first = block.token;
  const int64_t side = block.sequence * p.kv_heads + g;
  const int64_t index = s.tile_index(g, block.first_tile + first / kKeys);
  alignas(64) float rows[kKeys * kMaxDim];
  float steps[kKeys] = {};
  const int64_t valid = seq.k_tokens - first < kKeys ? seq.k_tokens - first : kKeys;
  const float* k_mean = plan.smooth_k ? s.k_mean + side * kMaxDim : nullptr;
  const float* v_mean = plan.smooth_v ? s.v_mean + side * kMaxDim : nullptr;
  // Keys that no query sees become zeros with a step of 0.
  const SeenTokens all_seen = s.seen_keys(p, seq, g, block.first_tile);
  bool seen[kKeys];
  for (int64_t r = 0; r < valid; ++r) seen[r] = !has_scales(plan) || all_seen[first + r];
  const auto zero_unseen = [&](float* rows, int64_t width) {
    for (int64_t r = 0; r < valid; ++r)
      if (!seen[r]) std::memset(rows + r * width, 0, sizeof(float) * static_cast<std::size_t>(width));
  };
  const auto clear_steps = [&] {
    for (int64_t r = 0; r < valid; ++r) steps[r] = seen[r] ? steps[r] : 0.f;
  };

  const int64_t width = padded<Qk>(padded_columns(p.dim)), token = seq.k_first + first;
  Word* k = s.k + index * s.k_stride;
  if (in_bytes<Qk>(plan.qk) && plan.k_group == 1 && !plan.k_coded) {
    pack_int8_keys<Qk>(p.k, seq.batch, g, token, valid, k_mean, plan.hadamard ? signs.sign : nullptr, s.k_words, k,
                       s.k_correction ? s.k_correction + index * kKeys : nullptr, steps);
  } else {
    if (plan.k_group == 1 && !plan.k_coded) {
      for (int64_t r = 0; r < valid; ++r)
        steps[r] = quantize_row(p.k, seq.batch, g, token + r, plan.qk, k_mean, plan.hadamard ? signs.sign : nullptr,
                                width, rows + r * width);
      std::memset(rows + valid * width, 0, sizeof(float) * static_cast<std::size_t>((kKeys - valid) * width));
    } else {
      load_operand(p.k, plan.k_coded, seq.batch, g, token, valid, kKeys, width, rows);
      for (int64_t r = 0; r < valid && !plan.k_coded; ++r) {
        if (plan.smooth_k) subtract(rows + r * width, k_mean, p.dim);
        if (plan.hadamard) hadamard_row(rows + r * width, signs.sign, p.dim);
      }
      zero_unseen(rows, width);
      if (plan.k_coded)
        for (int64_t r = 0; r < valid; ++r) steps[r] = given_scale(p.k, seq.batch, g, token + r);
      else
        quantize_rows(plan.qk, plan.smooth_k || plan.hadamard ? OCTET_F32 : numbers_of(p.k), plan.k_group, rows, valid,
                      width, steps);
    }
    constexpr bool kFloats = std::is_same_v<Qk, F32> || kSplits<Qk>;
#ifdef __AMX_BF16__
    if constexpr (kSplits<Qk>) {
      alignas(64) float columns[kMaxDim * kKeys];
      transpose(rows, kKeys, width, p.dim, columns);
      split_columns(columns, p.dim, p.dim, kKeys, k);
    }
#endif
    if (std::is_same_v<Qk, F32>) transpose(rows, kKeys, width, p.dim, reinterpret_cast<float*>(k));
    alignas(64) Word words[kMaxDim + 64];
    for (int64_t r = 0; r < kKeys && !kFloats; ++r) {
      encode_row<Qk>(rows + r * width, s.k_words * Qk::kPerWord, 0, words);
      for (int64_t w = 0; w < s.k_words; ++w) k[w * kKeys + r] = words[w];
      if constexpr (kBias<Qk> != 0) {
        int32_t sum = 0;
        for (int64_t c = 0; c < p.dim; ++c) sum += static_cast<int32_t>(rows[r * width + c]);
        s.k_correction[index * kKeys + r] = -kBias<Qk> * sum;
      }
    }
  }
  clear_steps();
  if (s.k_scale) std::memcpy(s.k_scale + index * kKeys, steps, sizeof steps);

  // Words of one float lie as the rows do, unless in panels.
  const bool panels = Pv::kPerWord == 1 && (kSplits<Pv> || s.v_panel < s.v_columns);
  Word* v = s.v_at(index);
  float* v_rows = Pv::kPerWord == 1 && !panels ? reinterpret_cast<float*>(v) : rows;
  const int64_t columns = s.v_columns;
  bool finite = true;
  const float v_unit = s.v_unit ? s.v_unit[side] : 1.f;
  const bool by_token = plan.v_scale == VScale::token && plan.v_group == 1 && !plan.v_coded && v_unit == 1.f;
  const bool v_bytes = in_bytes<Pv>(plan.v) && by_token;
  if (v_bytes) {
    pack_int8_values(p.v, seq.batch, g, token, valid, v_mean, columns, v, steps);
  } else if (by_token) {
    for (int64_t r = 0; r < valid; ++r)
      steps[r] = quantize_row(p.v, seq.batch, g, token + r, plan.v, v_mean, nullptr, columns, v_rows + r * columns);
    std::memset(v_rows + valid * columns, 0, sizeof(float) * static_cast<std::size_t>((kKeys - valid) * columns));
  } else {
    load_operand(p.v, plan.v_coded, seq.batch, g, token, valid, kKeys, columns, v_rows);
    zero_unseen(v_rows, columns);
    const auto divide = [&](float* x, int64_t n) {
      for (int64_t i = 0; i < n && v_unit != 1.f; ++i) x[i] *= 1.f / v_unit;
    };
    divide(v_rows, valid * columns);
    finite = row_amax(v_rows, kKeys * columns) < 0x1p100f;
    if (plan.smooth_v && !plan.v_coded) {
      alignas(64) float mean[kMaxDim];
      std::copy(v_mean, v_mean + p.dim_v, mean);
      divide(mean, p.dim_v);
      for (int64_t r = 0; r < valid; ++r)
        if (seen[r]) subtract(v_rows + r * columns, mean, p.dim_v);
    }
    if (plan.v_coded) {
      for (int64_t r = 0; r < valid; ++r) steps[r] = given_scale(p.v, seq.batch, g, token + r);
    } else if (s.v_channel) {
      float inverse[kMaxDim] = {};
      for (int64_t c = 0; c < p.dim_v; ++c)
        inverse[c] = step_of(s.v_channel[side * kMaxDim + c], largest_code(plan.v)).inverse;
      for (int64_t r = 0; r < valid; ++r)
        for (int64_t c = 0; c < p.dim_v; ++c) {
          float& x = v_rows[r * columns + c];
          x *= inverse[c];
          x += x - x;  // infinity becomes NaN: e4m3 has no other name for it
        }
      quantize_rows(plan.v, OCTET_F32, 0, v_rows, valid, columns, steps);
    } else if (plan.v_scale == VScale::power) {
      for (int64_t i = 0; i < valid * columns; i += kLanes) store(v_rows + i, round_11_bits(load(v_rows + i)));
    } else {
      quantize_rows(plan.v, plan.smooth_v ? OCTET_F32 : numbers_of(p.v),
                    plan.v_scale == VScale::token ? plan.v_group : 0, v_rows, valid, columns, steps);
      // f16 has infinities of its own.
      if (plan.v == OCTET_F16) finite = row_amax(v_rows, kKeys * columns) < 0x1p100f;
    }
  }
  if (s.v_scale) {
    clear_steps();
    for (int64_t r = 0; r < valid; ++r) finite &= steps[r] == steps[r];
  }
  s.v_finite[index] = finite;
  for (int64_t w = 0; w < s.v_words && Pv::kPerWord > 1 && !v_bytes; ++w)
    interleave_rows<Pv>(v_rows + w * Pv::kPerWord * columns, columns, columns, v + w * columns);
  if (s.v_scale) {
    for (int64_t r = valid; r < kKeys; ++r) steps[r] = 0.f;
    std::memcpy(s.v_scale + index * kKeys, steps, sizeof steps);
  }
#ifdef __AMX_BF16__
  if constexpr (kSplits<Pv>) {
    if (!finite)
      for (int64_t i = 0; i < kKeys * columns; ++i) rows[i] = splits(rows[i]) ? rows[i] : 0.f;
    return split_columns(rows, kKeys, kKeys, columns, v);
  }
#endif
  for (int64_t c = 0; c < columns && panels; c += s.v_panel) {
    const int64_t width = s.panel_width(c);
    for (int64_t r = 0; r < kKeys; ++r)
      std::memcpy(s.v_at(index, c) + r * width, v_rows + r * columns + c, sizeof(float) * width);
  }
}

// Largest finite magnitude of q in `group` tokens from `token` on.
inline float group_amax(const Problem& p, const Sequence& seq, int64_t h, int64_t token, int64_t group) {
  alignas(64) float row[kMaxDim];
  float largest = 0.f;
  for (int64_t i = token; i < token + group && i < seq.q_tokens; ++i) {
    if (!sees_a_key(p, seq, h, i)) continue;
    load_numbers(p.q, seq.batch, h, seq.q_first + i, 1, 1, padded_columns(p.dim), row);
    const float a = row_amax(row, padded_columns(p.dim));
    largest = a > largest && a < __builtin_inff() ? a : largest;
  }
  return largest;
}

// q.mean for each row of q and the mean that smoothing took from k.
inline void mean_logits(const Problem& p, const ForwardPlan& plan, const float* q, int64_t rows, int64_t width,
                        const Signs& signs, const float* k_mean, double* out) {
  alignas(64) float mean[kMaxDim] = {};
  std::memcpy(mean, k_mean, sizeof(float) * static_cast<std::size_t>(p.dim));
  if (plan.q_coded && p.q.quantization && p.q.quantization->hadamard_seed) hadamard_row(mean, signs.sign, p.dim);
  for (int64_t r = 0; r < rows; ++r) out[r] = dot_in_double(q + r * width, mean, p.dim);
}

// A step, or 1 for that of a row of zeros: it is divided by, and multiplied with infinities.
OCTET_INLINE float divisible(float step) { return step > 0.f || step != step ? step : 1.f; }

// The facts about the rows of a block that pack_queries finds out.
struct QueryRows {
  float step[kMaxBlockRows];         // 1 without scales
  double mean_logit[kMaxBlockRows];  // q.mean for the mean that smoothing took from k, 0 without
};

// Prepares `count` rows of q from `token` on, `valid` of them in the sequence: A words, `stride` apart.
template <class Qk>
void pack_queries(const Problem& p, const ForwardPlan& plan, const Sequence& seq, int64_t h, int64_t token,
                  int64_t valid, int64_t count, const Signs& signs, const float* k_mean, Word* q, int64_t stride,
                  int64_t words, QueryRows& found) {
  alignas(64) float buffer[kMaxBlockRows * kMaxDim];
  const int64_t width = padded<Qk>(padded_columns(p.dim));
  const bool in_place = std::is_same_v<Qk, F32> && words == width && stride == width;  // words are floats
  float* rows = in_place ? reinterpret_cast<float*>(q) : buffer;
  float(&steps)[kMaxBlockRows] = found.step;
  for (int64_t r = 0; r < count; ++r) steps[r] = 1.f;
  if (in_bytes<Qk>(plan.qk) && plan.q_group == 1 && !plan.q_coded) {
    alignas(64) double mean[kMaxDim] = {};
    for (int64_t c = 0; c < p.dim && k_mean; ++c) mean[c] = k_mean[c];
    for (int64_t r = 0; r < valid; ++r)
      steps[r] = divisible(int8_row(p.q, seq.batch, h, seq.q_first + token + r, nullptr,
                                    plan.hadamard ? signs.sign : nullptr, k_mean ? mean : nullptr, found.mean_logit + r,
                                    kBias<Qk>, words * Qk::kPerWord, reinterpret_cast<uint8_t*>(q + r * stride)));
    for (int64_t r = valid; r < count; ++r) std::memset(q + r * stride, kBias<Qk>, words * sizeof(Word));
    return;
  }
  if (plan.q_group == 1 && !plan.q_coded) {
    if (k_mean) {
      load_numbers(p.q, seq.batch, h, seq.q_first + token, valid, valid, width, rows);
      mean_logits(p, plan, rows, valid, width, signs, k_mean, found.mean_logit);
    }
    for (int64_t r = 0; r < valid; ++r)
      steps[r] = quantize_row(p.q, seq.batch, h, seq.q_first + token + r, plan.qk, nullptr,
                              plan.hadamard ? signs.sign : nullptr, width, rows + r * width);
    std::memset(rows + valid * width, 0, sizeof(float) * static_cast<std::size_t>((count - valid) * width));
  } else {
    load_operand(p.q, plan.q_coded, seq.batch, h, seq.q_first + token, valid, count, width, rows);
    if (k_mean) mean_logits(p, plan, rows, valid, width, signs, k_mean, found.mean_logit);
    for (int64_t r = 0; r < valid && plan.hadamard && !plan.q_coded; ++r)
      hadamard_row(rows + r * width, signs.sign, p.dim);
    if (plan.q_coded) {
      for (int64_t r = 0; r < valid; ++r) {
        steps[r] = given_scale(p.q, seq.batch, h, seq.q_first + token + r);
        if (k_mean) found.mean_logit[r] *= steps[r];
      }
    } else if (plan.q_group == 0) {
      quantize_rows(plan.qk, plan.hadamard ? OCTET_F32 : numbers_of(p.q), 0, rows, valid, width, steps);
    } else {
      Step step{};
      for (int64_t r = 0; r < valid; ++r) {
        const int64_t first = (token + r) / plan.q_group * plan.q_group;
        if (r == 0 || first == token + r)
          step = step_of(group_amax(p, seq, h, first, plan.q_group), largest_code(plan.qk));
        steps[r] = row_amax(rows + r * width, width) < __builtin_inff() ? step.step : __builtin_nanf("");
        round_row_to(plan.qk, step.inverse, rows + r * width, width);
      }
    }
  }
  for (int64_t r = 0; r < valid; ++r) steps[r] = divisible(steps[r]);
#ifdef __AMX_BF16__
  if constexpr (kSplits<Qk>) {
    for (int64_t r = 0; r < count; ++r) split_row(rows + r * width, width, width / 2, q + r * stride);
    return;
  }
#endif
  for (int64_t r = 0; r < count && !in_place; ++r)
    encode_row<Qk>(rows + r * width, words * Qk::kPerWord, kBias<Qk>, q + r * stride);
}

}  // namespace octet::cpu::OCTET_ISA
