// The calls of primitives.h for one instruction set. Nothing here is shared with the rest of the test: no container, no
// function of the standard library that is not inlined.
#include "primitives.h"

#include "cpu/attention/fwd/launch.h"

namespace octet::cpu {
namespace OCTET_ISA {

using test::Engine;
using test::PackedKeys;
using test::Product;
using test::SoftmaxRow;

constexpr float kSentinel = 77.f;

// Padding beside c: columns to the right, rows below.
constexpr int64_t kBeside = 16;

template <class Sum>
inline void load_c(const Product& x, int64_t ldc, int64_t rows, Sum* c) {
  for (int64_t i = 0; i < rows * ldc; ++i) c[i] = static_cast<Sum>(kSentinel);
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t j = 0; j < x.columns; ++j) c[i * ldc + j] = static_cast<Sum>(x.c[i * x.columns + j]);
}

// `written`: rows that the product may write.
template <class Sum>
inline void store_c(Product& x, int64_t ldc, int64_t rows, int64_t written, const Sum* c) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < ldc; ++j) {
      if (i < x.rows && j < x.columns)
        x.c[i * x.columns + j] = c[i * ldc + j];
      else if ((i >= written || j >= x.columns) && c[i * ldc + j] != static_cast<Sum>(kSentinel))
        x.outside = true;
    }
}

template <class E>
inline void product_of(Product& x) {
  const int64_t words = words_of<E>(x.depth), written = E::kTiles ? padded_rows(x.rows) : x.rows;
  const int64_t rows = padded_rows(x.rows) + kBeside, ldc = x.columns + kBeside;
  WorkspaceAllocator memory(x.memory);
  Word* a = memory.take<Word>(rows * words);
  Word* b = memory.take<Word>(words * x.columns);
  auto* c = memory.take<typename E::Sum>(rows * ldc);
  float* row = memory.take<float>(words * E::kPerWord);
  float* group = memory.take<float>(E::kPerWord * x.columns);
  const int bias = x.engine == Engine::int8 ? kBias<E> : 0;
  std::memset(a, 0, sizeof(Word) * rows * words);
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t e = 0; e < words * E::kPerWord; ++e) row[e] = e < x.depth ? x.a[i * x.depth + e] : 0.f;
    if (!x.transposed_a) {
      encode_row<E>(row, words * E::kPerWord, bias, a + i * words);
      continue;
    }
    for (int64_t w = 0; w < words; ++w) std::memcpy(a + w * rows + i, row + w, sizeof(Word));
  }
  for (int64_t w = 0; w < words; ++w) {
    for (int64_t e = 0; e < E::kPerWord; ++e)
      for (int64_t j = 0; j < x.columns; ++j)
        group[e * x.columns + j] = w * E::kPerWord + e < x.depth ? x.b[(w * E::kPerWord + e) * x.columns + j] : 0.f;
    interleave_rows<E>(group, x.columns, x.columns, b + w * x.columns);
  }
  load_c(x, ldc, rows, c);
  const Strides strides = x.transposed_a ? Strides{1, rows} : Strides{words, 1};
  configure_tiles();
  if constexpr (std::is_same_v<typename E::Sum, float>) {
    if (x.skip_zeros)
      matmul_skipping_zeros<E>(a, strides, b, x.columns, c, ldc, x.rows, x.columns, words);
    else if (x.accumulate)
      matmul<E, true>(a, strides, b, x.columns, c, ldc, x.rows, x.columns, words);
    else
      matmul<E, false>(a, strides, b, x.columns, c, ldc, x.rows, x.columns, words);
  } else if (x.accumulate) {
    matmul<E, true>(a, strides, b, x.columns, c, ldc, x.rows, x.columns, words);
  } else {
    matmul<E, false>(a, strides, b, x.columns, c, ldc, x.rows, x.columns, words);
  }
  release_tiles();
  for (int64_t j = 0; j < x.columns && bias; ++j) {
    int32_t sum = 0;
    for (int64_t e = 0; e < x.depth; ++e) sum += static_cast<int32_t>(x.b[e * x.columns + j]);
    for (int64_t i = 0; i < x.rows; ++i) c[i * ldc + j] -= static_cast<typename E::Sum>(bias * sum);
  }
  store_c(x, ldc, rows, written, c);
}

inline void split_product([[maybe_unused]] Product& x) {
#ifdef __AMX_BF16__
  const int64_t part = part_words(x.depth), stride = kParts * part + 16;
  const int64_t rows = padded_rows(x.rows) + kBeside, ldc = x.columns + kBeside;
  WorkspaceAllocator memory(x.memory);
  Word* a = memory.take<Word>(rows * stride);
  Word* b = memory.take<Word>(kParts * part * x.columns);
  float* c = memory.take<float>(rows * ldc);
  float* row = memory.take<float>(2 * part);
  std::memset(a, 0, sizeof(Word) * rows * stride);
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t e = 0; e < 2 * part; ++e) row[e] = e < x.depth ? x.a[i * x.depth + e] : 0.f;
    split_row(row, 2 * part, part, a + i * stride);
  }
  split_columns(x.b, x.depth, x.depth, x.columns, b);
  load_c(x, ldc, rows, c);
  configure_tiles();
  const SplitShape shape{.words = part, .a_row = stride, .a_part = part};
  if (x.accumulate)
    split_matmul<true>(shape, a, b, c, ldc, x.rows, x.columns);
  else
    split_matmul<false>(shape, a, b, c, ldc, x.rows, x.columns);
  release_tiles();
  store_c(x, ldc, rows, padded_rows(x.rows), c);
#endif
}

inline void product(Product& x) {
  switch (x.engine) {
    case Engine::f32:
      return product_of<F32>(x);
    case Engine::bf16:
      return product_of<Bf16>(x);
    case Engine::int8:
      return product_of<Int8>(x);
    case Engine::uint8:
      return product_of<UInt8>(x);
    case Engine::split:
      return split_product(x);
  }
}

inline void exp2_of(int degree, const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vf v = load(x + i);
    store(y + i, degree == kExp2For8Bits    ? exp2<kExp2For8Bits>(v)
                 : degree == kExp2For16Bits ? exp2<kExp2For16Bits>(v)
                                            : exp2<kExp2For32Bits>(v));
  }
}

// Element e of row r of B [words][stride], as a number.
template <class E>
inline double element_of(const Word* b, int64_t stride, int64_t r, int64_t e) {
  const Word word = b[e / E::kPerWord * stride + r];
  if constexpr (E::kPerWord == 4) return static_cast<int8_t>(word >> (e % 4 * 8));
  return element<E>(word, static_cast<int>(e % E::kPerWord));
}

// Element [row][column] of B made by split_columns of `count` rows and `columns` columns.
inline double split_element([[maybe_unused]] const Word* b, [[maybe_unused]] int64_t count,
                            [[maybe_unused]] int64_t columns, [[maybe_unused]] int64_t row,
                            [[maybe_unused]] int64_t column) {
  double sum = 0;
#ifdef __AMX_BF16__
  const int64_t words = part_words(count), panel = column / kSplitPanel * kSplitPanel;
  const int64_t width = std::min(kSplitPanel, columns - panel);
  for (int64_t part = 0; part < kParts; ++part) {
    const Word word = b[kParts * words * panel + (part * words + row / 2) * width + column - panel];
    sum += element<Bf16>(word, static_cast<int>(row % 2));
  }
#endif
  return sum;
}

template <class Qk, class Pv>
inline void packed_keys_as(const Problem& p, const ForwardNumerics& numerics, void* memory, const PackedKeys& out) {
  WorkspaceAllocator workspace(memory);
  const KeySide s = allocate_key_side<Qk, Pv>(p, numerics, workspace);
  const Sequence seq{0, 0, p.tokens_q, 0, p.tokens_k, 0};
  const Signs signs(p.q, p.dim);
  for (int64_t g = 0; g < p.kv_heads; ++g) {
    channel_statistics(p, numerics, seq, g, g, s.seen_keys(p, seq, g, 0), s);
    for (int64_t token = 0; token < p.tokens_k; token += kKeys)
      pack_key_tile<Qk, Pv>(p, numerics, seq, {0, g, token, 0}, signs, s);
    for (int64_t c = 0; c < kMaxDim; ++c) {
      out.k_mean[g * kMaxDim + c] = s.k_mean ? s.k_mean[g * kMaxDim + c] : 0.f;
      out.v_mean[g * kMaxDim + c] = s.v_mean ? s.v_mean[g * kMaxDim + c] : 0.f;
    }
    for (int64_t token = 0; token < p.tokens_k; ++token) {
      const int64_t index = s.tile_index(g, token / kKeys), r = token % kKeys, at = g * p.tokens_k + token;
      const float k_scale = out.k_scale[at] = s.k_scale ? s.k_scale[index * kKeys + r] : 1.f;
      const float v_scale = out.v_scale[at] = s.v_scale ? s.v_scale[index * kKeys + r] : 1.f;
      const double v_range = s.v_range ? s.v_range[g] : 1.0;
      int32_t sum = 0;
      for (int64_t c = 0; c < p.dim; ++c) {
        const Word* k = s.k + index * s.k_stride;
        const double x = kSplits<Qk> ? split_element(k, p.dim, kKeys, c, r) : element_of<Qk>(k, kKeys, r, c);
        sum += static_cast<int32_t>(x);
        out.k[at * p.dim + c] = x * k_scale;
      }
      if (s.k_correction && s.k_correction[index * kKeys + r] != -kBias<Qk> * sum) out.k[at * p.dim] = 1e30;
      for (int64_t c = 0; c < p.dim_v; ++c) {
        const int64_t first = kSplits<Pv> ? 0 : c / s.v_panel * s.v_panel;
        const Word* v = s.v_at(index, first);
        double x = kSplits<Pv> ? split_element(v, kKeys, s.v_columns, r, c)
                               : element_of<Pv>(v, s.panel_width(first), c - first, r);
        if (s.v_channel) x *= scale_of(s.v_channel[g * kMaxDim + c], largest_quantized(numerics.v)).scale;
        out.v[at * p.dim_v + c] = x * v_scale * v_range;
      }
    }
  }
}

template <class Qk>
inline void packed_queries_as(const Problem& p, const ForwardNumerics& numerics, int64_t token, int64_t rows,
                              void* memory, double* q, float* scale) {
  WorkspaceAllocator workspace(memory);
  QueryRows& found = *workspace.take<QueryRows>(1);
  const int64_t words = words_of<Qk>(p.dim), stride = words + (kSplits<Qk> ? 16 : 0), count = padded_rows(rows);
  Word* out = workspace.take<Word>(count * stride);
  const Sequence seq{0, 0, p.tokens_q, 0, p.tokens_k, 0};
  const Signs signs(p.q, p.dim);
  pack_queries<Qk>(p, numerics, seq, 0, token, rows, count, signs, nullptr, out, stride, words, found);
  for (int64_t i = 0; i < rows; ++i) {
    scale[i] = found.scale[i];
    for (int64_t c = 0; c < p.dim; ++c) {
      double x = 0;
      const Word* row = out + i * stride;
      if constexpr (kSplits<Qk>) {
        const int64_t part = words / 3;
        for (int64_t n = 0; n < 3; ++n) x += element<Bf16>(row[n * part + c / 2], static_cast<int>(c % 2));
      } else if constexpr (Qk::kPerWord == 4) {
        const auto byte = static_cast<uint8_t>(row[c / 4] >> (c % 4 * 8));
        x = kBias<Qk> ? static_cast<double>(byte) - kBias<Qk> : static_cast<double>(static_cast<int8_t>(byte));
      } else {
        x = element<Qk>(row[c / Qk::kPerWord], static_cast<int>(c % Qk::kPerWord));
      }
      q[i * p.dim + c] = x * found.scale[i];
    }
  }
}

inline std::size_t pack_bytes(const Problem& p) {
  const ForwardNumerics numerics = forward_numerics(p);
  std::size_t bytes = 0;
  with_engines(numerics, [&]<class Qk, class Pv, PFormat>() {
    WorkspaceAllocator workspace(nullptr);
    allocate_key_side<Qk, Pv>(p, numerics, workspace);
    bytes = workspace.used();
  });
  return bytes;
}

inline void packed_keys(const Problem& p, void* memory, const PackedKeys& out) {
  const ForwardNumerics numerics = forward_numerics(p);
  with_engines(numerics, [&]<class Qk, class Pv, PFormat>() { packed_keys_as<Qk, Pv>(p, numerics, memory, out); });
}

inline void packed_queries(const Problem& p, int64_t token, int64_t rows, void* memory, double* q, float* scale) {
  const ForwardNumerics numerics = forward_numerics(p);
  with_engines(numerics,
               [&]<class Qk, class, PFormat>() { packed_queries_as<Qk>(p, numerics, token, rows, memory, q, scale); });
}

template <class Pv, PFormat format>
inline void softmax_row_as(SoftmaxRow& x) {
  constexpr int64_t kRows = kLanes;  // of which the first counts
  const float p_top = format == PFormat::u8     ? 255.f
                      : format == PFormat::e4m3 ? 256.f
                      : format == PFormat::f16  ? 64.f
                                                : 1.f;
  ForwardNumerics numerics{};
  numerics.p = format, numerics.p_top = p_top;
  RowState<kRows> state;
  std::memset(&state, 0, sizeof state);
  state.unit = 1.f;
  for (int64_t i = 0; i < kRows; ++i)
    state.m[i] = kMinusInfinity, state.softmax_scale_log2[i] = kLog2e, state.to_logit[i] = 1.f;
  alignas(64) float s[kMaxStepKeys], v_scale[kMaxStepKeys];
  alignas(64) typename Pv::Element p[kMaxStepKeys];
  for (float& one : v_scale) one = 1.f;
  for (int64_t key = 0; key < x.keys; key += kMaxStepKeys) {
    const int64_t count = std::min(x.keys - key, kMaxStepKeys), tiles = (count + kKeys - 1) / kKeys;
    for (int64_t j = 0; j < kMaxStepKeys; ++j) s[j] = j < count ? x.logits[key + j] : 0.f;
    std::memset(p, 0, sizeof p);
    TileRow row{};
    row.first = static_cast<int>(std::clamp<int64_t>(x.first - key, 0, tiles * kKeys));
    row.last = static_cast<int>(std::clamp<int64_t>(x.last - key, 0, tiles * kKeys));
    const bool whole = row.first == 0 && row.last == tiles * kKeys;
    state.alpha[0] = 1.f;
    bool done = false;
    if constexpr (may_keep_stale_max(format))
      done = x.stale_max && whole && state.m[0] != kMinusInfinity &&
             p_of_row_stale_max<F32, Pv, format>(numerics, s, row, tiles, v_scale, 0, state, p);
    if (!done) {
      alignas(64) float tops[kLanes];
      store(tops, splat(kMinusInfinity));
      tops[0] = logits_row<F32>(s, row, tiles, 1.f);
      update_max<exp2_degree(format)>(tops, 0, state);
      p_of_row<Pv, format>(numerics, s, tiles, v_scale, true, 0, state, p);
    }
    for (int64_t j = 0; j < key; ++j) x.p[j] *= state.alpha[0];
    for (int64_t j = 0; j < count; ++j) {
      double own_p;
      if constexpr (sizeof(typename Pv::Element) == 2)
        own_p = from_bf16(p[j]);
      else
        own_p = p[j];
      x.p[key + j] = format == PFormat::u8 ? own_p * state.p_scale[0][j / kKeys] : own_p;
    }
  }
  const float l = reduce_add(load(state.l[0]));
  for (int64_t j = 0; j < x.keys; ++j) x.p[j] = l != 0.f ? x.p[j] / l : 0.0;
  x.lse = state.m[0] + __builtin_log(static_cast<double>(l) / (scales_p(format) ? p_top : 1.f));
}

inline void softmax_row(SoftmaxRow& x) {
  switch (x.format) {
    case PFormat::exact:
      return softmax_row_as<F32, PFormat::exact>(x);
    case PFormat::bf16:
      return softmax_row_as<Bf16, PFormat::bf16>(x);
    case PFormat::f16:
      return softmax_row_as<F32, PFormat::f16>(x);
    case PFormat::e4m3:
      return softmax_row_as<Bf16, PFormat::e4m3>(x);
    case PFormat::u8:
      return softmax_row_as<UInt8, PFormat::u8>(x);
  }
}

}  // namespace OCTET_ISA

namespace test {

#define OCTET_CONCAT(a, b) a##b
#define OCTET_TABLE(isa) OCTET_CONCAT(primitives_, isa)
#define OCTET_TEXT(isa) #isa
#define OCTET_NAME(isa) OCTET_TEXT(isa)

extern const Primitives OCTET_TABLE(OCTET_ISA);
const Primitives OCTET_TABLE(OCTET_ISA) = {
    OCTET_NAME(OCTET_ISA),     OCTET_ISA::kColumnStep, OCTET_ISA::kPanelColumns, OCTET_ISA::kSplits<OCTET_ISA::Split>,
    OCTET_ISA::product,        OCTET_ISA::exp2_of,     OCTET_ISA::pack_bytes,    OCTET_ISA::packed_keys,
    OCTET_ISA::packed_queries, OCTET_ISA::softmax_row, OCTET_ISA::find_kept};

}  // namespace test
}  // namespace octet::cpu
