// Tests that the quantized values of the GPU equal those of the CPU bit by bit: q, k and v are quantized here by the
// arithmetic of core/quant.
#include "cuda/operands/quantize/quantize.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/quant/hadamard.h"
#include "core/quant/scale.h"

namespace octet::cuda {
namespace {

void must(cudaError_t status) { ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status); }

// An array on the device, filled with NaN.
template <class T>
struct Array {
  T* data = nullptr;
  std::size_t count;
  explicit Array(std::size_t count) : count(count) {
    must(cudaMalloc(reinterpret_cast<void**>(&data), bytes()));
    must(cudaMemset(data, 0xff, bytes()));
  }
  ~Array() { cudaFree(data); }
  Array(const Array&) = delete;
  std::size_t bytes() const { return count * sizeof(T) + 16; }
  std::vector<T> read() const {
    std::vector<T> x(count);
    must(cudaMemcpy(x.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return x;
  }
};

template <class T>
float store(void* at, float x) {
  const T rounded(x);
  std::memcpy(at, &rounded, sizeof rounded);
  return static_cast<float>(rounded);
}
std::size_t size_of(Element e) { return e == Element::f32 ? 4 : e == Element::e4m3 ? 1 : 2; }
float store(Element e, void* at, float x) {
  switch (e) {
    case Element::f32:
      return store<float>(at, x);
    case Element::f16:
      return store<__half>(at, x);
    case Element::bf16:
      return store<__nv_bfloat16>(at, x);
    default:
      return store<__nv_fp8_e4m3>(at, x);
  }
}

struct Layout {
  const char* name;
  std::vector<int> cu_seqlens;  // empty: not packed
  int batch, queries, keys;
  bool gaps;       // rows of odd length
  bool poisoned;   // an infinity in one token, NaN in another
  Mask mask{};     // what it hides from all queries is NaN
  bool outlier{};  // a key is 2^10 times the others

  int first(int sequence) const { return cu_seqlens.empty() ? 0 : cu_seqlens[sequence]; }
  int tokens(int sequence) const { return cu_seqlens.empty() ? keys : cu_seqlens[sequence + 1] - cu_seqlens[sequence]; }
  // The keys of a sequence, [first, second), that some query sees.
  std::pair<int, int> seen(int sequence) const {
    const int m = tokens(sequence), n = cu_seqlens.empty() ? queries : m;
    if (!mask.windowed) return {0, n ? m : 0};
    const int shift = mask.bottom_right ? m - n : 0;
    const int first = std::clamp(shift - mask.left, 0, m);
    return {first, std::clamp(n + shift + mask.right, first, m)};
  }
};

struct Recipe {
  const char* name;
  QuantizedFormat qk, v;
  bool groups, rotated;
};

// Returns true if some query sees a token of k and v.
bool is_seen(const Layout& layout, int token) {
  int sequence = 0;
  while (!layout.cu_seqlens.empty() && layout.cu_seqlens[sequence + 1] <= token) ++sequence;
  const auto [first, last] = layout.seen(sequence);
  const int i = token - layout.first(sequence);
  return first <= i && i < last;
}

struct RandomTensor {
  Strided view;
  std::vector<float> numbers;
  Array<unsigned char> memory;

  // `of_keys`: numbers have offsets by channel, and tokens that no query sees are NaN.
  RandomTensor(Element e, int64_t batch, int64_t heads, int64_t tokens, int64_t dim, bool of_keys, const Layout& layout,
               std::mt19937& random)
      : numbers(batch * heads * tokens * dim), memory(batch * heads * tokens * (dim + 3) * size_of(e)) {
    const int64_t row = layout.gaps ? dim + 3 : dim;
    view = {memory.data, {batch, heads, tokens, dim}, {heads * tokens * row, tokens * row, row, 1}, e};
    std::normal_distribution<float> normal;
    std::vector<float> offsets(heads * dim);
    for (float& x : offsets) x = of_keys ? 3 * normal(random) : 0.f;
    std::vector<unsigned char> bytes(memory.count, 0xff);
    for (int64_t i = 0; i < batch * heads * tokens; ++i)
      for (int64_t c = 0; c < dim; ++c) {
        float x = normal(random) + offsets[i / tokens % heads * dim + c];
        if (i % 97 == 5) x = 0.f;
        if (layout.poisoned && i % tokens == 37 && c == 3) x = INFINITY;
        if (layout.poisoned && i % tokens == 70) x = NAN;
        if (of_keys && layout.outlier && i % tokens == 90) x *= 0x1p10f;
        if (of_keys && !is_seen(layout, static_cast<int>(i % tokens))) x = NAN;
        numbers[i * dim + c] = store(e, &bytes[(i * row + c) * size_of(e)], x);
      }
    must(cudaMemcpy(memory.data, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
  }
};

uint8_t quantized_of(QuantizedFormat format, float x) {
  if (format == QuantizedFormat::s8) return static_cast<uint8_t>(static_cast<int>(std::nearbyint(x)));
  return __nv_fp8_e4m3(std::isinf(x) ? NAN : x).__x;
}
// Zero and NaN have two encodings in e4m3, of which this returns one.
uint8_t unique(QuantizedFormat format, uint8_t x) {
  if (format == QuantizedFormat::s8) return x;
  const uint8_t magnitude = x & 0x7f;
  return magnitude == 0 || magnitude == 0x7f ? magnitude : x;
}
bool same(float x, float y) { return x == y || (std::isnan(x) && std::isnan(y)); }

// The number of differences of each kind.
struct Differences {
  int64_t means = 0, v_channel_scales = 0, k_scales = 0, k = 0, v = 0, v_scales = 0, mean_logits = 0, q_scales = 0,
          q = 0;
};

class GpuQuantizedBitByBit : public testing::TestWithParam<std::tuple<Element, int, Recipe, Layout>> {};

TEST_P(GpuQuantizedBitByBit, are_those_of_the_cpu) {
  const auto& [element, dim, recipe, layout] = GetParam();
  if (element == Element::e4m3 && recipe.qk == QuantizedFormat::s8) GTEST_SKIP() << "e4m3 is quantized at fp8 alone";
  if (dim > 128 && recipe.v != QuantizedFormat::none) GTEST_SKIP() << "v is quantized up to head dim 128";
  constexpr int kHeads = 4, kKvHeads = 2;
  const int padded = dim <= 64    ? 64
                     : dim <= 128 ? 128
                                  : 256,
            tile = recipe.v == QuantizedFormat::s8 && padded == 64 ? 96 : 128;
  const bool packed = !layout.cu_seqlens.empty(), prequantized = element == Element::e4m3;
  const int sequences = packed ? static_cast<int>(layout.cu_seqlens.size()) - 1 : layout.batch;
  std::mt19937 random(static_cast<unsigned>(dim));
  const RandomTensor q(element, layout.batch, kHeads, layout.queries, dim, false, layout, random);
  const RandomTensor k(element, layout.batch, kKvHeads, layout.keys, dim, true, layout, random);
  const RandomTensor v(element, layout.batch, kKvHeads, layout.keys, dim, true, layout, random);

  Array<int> cu_seqlens(layout.cu_seqlens.size());
  must(cudaMemcpy(cu_seqlens.data, layout.cu_seqlens.data(), layout.cu_seqlens.size() * sizeof(int),
                  cudaMemcpyHostToDevice));
  QuantizeParams a{};
  a.q = q.view, a.k = k.view, a.v = v.view;
  a.dim = padded, a.heads = kHeads, a.kv_heads = kKvHeads;
  const int* const first = packed ? cu_seqlens.data : nullptr;
  a.keys = {first, packed ? sequences : 0, layout.keys, tile, layout.mask, layout.queries, first};
  a.cu_seqlens_q = a.keys.cu_seqlens;
  if (recipe.rotated) {
    a.rotation.block = static_cast<int>(hadamard_block(dim));
    a.rotation.norm = 1.f / std::sqrt(static_cast<float>(a.rotation.block));
    for (int c = 0; c < dim; ++c)
      if (hadamard_sign(kHadamardSeed, c) < 0.f) a.rotation.negative[c / 32] |= 1u << c % 32;
  }
  a.q_type = a.k_type = prequantized ? QuantizedFormat::none : recipe.qk, a.v_type = recipe.v,
  a.k_groups = recipe.groups;
  const int64_t keys = static_cast<int64_t>(a.keys.count()) * tile, batch_heads = layout.batch * kKvHeads;
  const int64_t queries = static_cast<int64_t>(layout.batch) * kHeads * layout.queries;
  Array<float> k_mean(sequences * kKvHeads * padded), v_mean(k_mean.count), v_channel_scale(k_mean.count),
      v_inverse(k_mean.count), q_scale(queries), k_scale(batch_heads * keys), v_scale(2 * batch_heads * keys),
      mean_logit(queries);
  Array<uint8_t> q_quantized(queries * padded), k_quantized(batch_heads * keys * padded),
      v_quantized(k_quantized.count);
  if (!prequantized) a.channels.k_mean = k_mean.data, a.mean_logit = mean_logit.data;
  if (recipe.v == QuantizedFormat::s8)
    a.channels.v_mean = v_mean.data, a.v_scale = v_scale.data;
  else if (recipe.v == QuantizedFormat::e4m3)
    a.channels.v_scale = v_channel_scale.data, a.channels.v_inverse = v_inverse.data;
  a.q_scale = q_scale.data, a.k_scale = k_scale.data;
  a.q_quantized = q_quantized.data, a.k_quantized = k_quantized.data, a.v_quantized = v_quantized.data;
  Array<unsigned char> scratch(quantize_scratch_bytes(a));
  quantize(a, scratch.data, nullptr);
  must(cudaDeviceSynchronize());

  Differences found;
  std::vector<float> signs(dim);
  for (int c = 0; c < dim; ++c) signs[c] = hadamard_sign(kHadamardSeed, c);
  const float top = recipe.qk == QuantizedFormat::s8 ? 127.f : 448.f;
  const auto got_k = k_quantized.read(), got_v = v_quantized.read(), got_q = q_quantized.read();
  const auto got_k_scale = k_scale.read(), got_v_scale = v_scale.read(), got_q_scale = q_scale.read(),
             got_logit = mean_logit.read(), got_k_mean = k_mean.read(), got_v_mean = v_mean.read(),
             got_channel = v_channel_scale.read();
  std::vector<std::vector<float>> means(sequences * kKvHeads);
  for (int64_t batch_head = 0; batch_head < sequences * kKvHeads; ++batch_head) {
    const int64_t s = batch_head / kKvHeads, memory_head = packed ? batch_head % kKvHeads : batch_head;
    const int of_layout = packed ? static_cast<int>(s) : 0;
    const int64_t first = layout.first(of_layout), tokens = layout.tokens(of_layout);
    const auto [first_seen, last_seen] = layout.seen(of_layout);
    const auto is_seen = [&, from = first_seen, to = last_seen](int64_t t) { return from <= t && t < to; };
    const int64_t seen = last_seen - first_seen;
    const int64_t at = memory_head * keys + (packed ? (first / tile + s) * tile : 0);
    const auto element_of = [&](const RandomTensor& x, int64_t t, int64_t c) {
      return c < dim && is_seen(t) ? x.numbers[(memory_head * layout.keys + first + t) * dim + c] : 0.f;
    };
    const auto limit_of = [&, from = first_seen](const RandomTensor& x) {
      const int64_t sampled = std::min(seen, kSampledTokens);
      std::vector<float> largest(sampled);
      for (int64_t i = 0; i < sampled; ++i)
        for (int c = 0; c < dim; ++c) {
          const float y = std::fabs(element_of(x, from + i * seen / sampled, c));
          if (std::isfinite(y)) largest[i] = std::max(largest[i], y);
        }
      return mean_limit(largest.data(), sampled);
    };
    const float k_limit = limit_of(k), v_limit = limit_of(v);
    std::vector<float> k_channel(padded), v_channel_mean(padded);
    std::vector<Scale> channel_scale(padded);
    for (int c = 0; c < padded; ++c) {
      double k_sum = 0.0, v_sum = 0.0;
      float most = 0.f;
      for (int64_t t = 0; t < tokens; ++t) {
        const float x = element_of(k, t, c), y = element_of(v, t, c);
        if (std::fabs(x) < k_limit) k_sum += x;
        if (std::fabs(y) < v_limit) v_sum += y;
        if (std::isfinite(y)) most = std::max(most, std::fabs(y));
      }
      k_channel[c] = seen && !prequantized ? static_cast<float>(k_sum / static_cast<double>(seen)) : 0.f;
      v_channel_mean[c] = seen ? static_cast<float>(v_sum / static_cast<double>(seen)) : 0.f;
      channel_scale[c] = scale_of(most, 448.f);
      if (!prequantized) found.means += !same(got_k_mean[batch_head * padded + c], k_channel[c]);
      if (recipe.v == QuantizedFormat::s8)
        found.means += !same(got_v_mean[batch_head * padded + c], v_channel_mean[c]);
      else if (recipe.v == QuantizedFormat::e4m3)
        found.v_channel_scales += !same(got_channel[batch_head * padded + c], channel_scale[c].scale);
    }
    means[batch_head] = k_channel;

    const int64_t laid_out = (tokens + tile - 1) / tile * tile;
    for (int64_t block = 0; block < laid_out && !prequantized; block += recipe.groups ? 64 : 1) {
      const int64_t rows = recipe.groups ? 64 : 1;
      std::vector<std::vector<float>> x(rows, std::vector<float>(padded));
      std::vector<float> largest(rows);
      float of_group[4] = {};
      bool lost[4] = {};
      for (int64_t r = 0; r < rows; ++r) {
        for (int c = 0; c < dim && is_seen(block + r); ++c) x[r][c] = element_of(k, block + r, c) - k_channel[c];
        if (recipe.rotated) hadamard(x[r].data(), signs.data(), dim);
        largest[r] = amax(x[r].data(), padded);
        if (std::isfinite(largest[r]))
          of_group[r % 8 / 2] = std::max(of_group[r % 8 / 2], largest[r]);
        else
          lost[r % 8 / 2] = true;
      }
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = at + block + r, group = r % 8 / 2;
        const bool finite = std::isfinite(largest[r]);
        Scale scale = scale_of(recipe.groups ? of_group[group] : largest[r], top);
        // Integers have no NaN, so the scale of the whole group becomes NaN.
        const float want = recipe.groups && lost[group] && recipe.qk == QuantizedFormat::s8 ? NAN : scale.scale;
        found.k_scales += !same(got_k_scale[recipe.groups ? (row - r) / 16 + group : row], want);
        for (int c = 0; c < padded; ++c) {
          const float y = finite                                                ? x[r][c] * scale.inverse
                          : recipe.groups && recipe.qk == QuantizedFormat::e4m3 ? NAN
                                                                                : 0.f;
          found.k += unique(recipe.qk, quantized_of(recipe.qk, y)) != unique(recipe.qk, got_k[row * padded + c]);
        }
      }
    }

    for (int64_t first_key = 0; first_key < laid_out && recipe.v != QuantizedFormat::none; first_key += tile) {
      float most = 0.f;
      std::vector<Scale> scales(tile);
      for (int j = 0; j < tile; ++j) {
        std::vector<float> row(padded);
        for (int c = 0; c < dim && is_seen(first_key + j); ++c)
          row[c] = element_of(v, first_key + j, c) - (recipe.v == QuantizedFormat::s8 ? v_channel_mean[c] : 0.f);
        scales[j] = scale_of(amax(row.data(), padded), 127.f);
        most = std::fmax(most, scales[j].scale);
        constexpr int kOrder[] = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};  // where key j mod 16 lies
        const int64_t lies = at + first_key + j / 16 * 16 + kOrder[j % 16];
        for (int c = 0; c < padded; ++c) {
          const float y = recipe.v == QuantizedFormat::s8
                              ? (std::isnan(scales[j].scale) ? 0.f : row[c] * scales[j].inverse)
                              : row[c] * channel_scale[c].inverse;
          const int64_t of_channel = memory_head * padded * keys + c * keys + lies - memory_head * keys;
          found.v += unique(recipe.v, quantized_of(recipe.v, y)) != unique(recipe.v, got_v[of_channel]);
        }
      }
      for (int j = 0; j < tile && recipe.v == QuantizedFormat::s8; ++j) {
        const float scale = scales[j].scale == 0.f ? (most == 0.f ? 1.f : most * 0x1p-40f) : scales[j].scale;
        const float logarithm = got_v_scale[2 * (at + first_key) + j],
                    inverse = got_v_scale[2 * (at + first_key) + tile + j];
        const bool right = std::isnan(scale) ? std::isnan(logarithm) && inverse == 0.f
                                             : std::fabs(logarithm - std::log2(scale)) < 1e-5 &&
                                                   inverse == 1.f / scale * kInverseScale;
        found.v_scales += !right;
      }
    }
  }

  for (int64_t row = 0; row < queries && !prequantized; ++row) {
    std::vector<float> x(padded);
    std::copy_n(&q.numbers[row * dim], dim, x.begin());
    const int64_t token = row % layout.queries, head = row / layout.queries % kHeads;
    int64_t sequence = row / layout.queries / kHeads;
    if (packed)
      while (sequence + 1 < sequences && layout.cu_seqlens[sequence + 1] <= token) ++sequence;
    double logit = 0.0;
    for (int c = 0; c < dim; ++c)
      logit += static_cast<double>(x[c]) * means[sequence * kKvHeads + head / (kHeads / kKvHeads)][c];
    if (std::isfinite(logit)) found.mean_logits += !(std::fabs(got_logit[row] - logit) < 1e-4 * (1 + std::fabs(logit)));
    if (recipe.rotated) hadamard(x.data(), signs.data(), dim);
    const float largest = amax(x.data(), padded);
    const Scale scale = scale_of(largest, top);
    found.q_scales += !same(got_q_scale[row], scale.scale);
    for (int c = 0; c < padded; ++c) {
      const float y = std::isfinite(largest) ? x[c] * scale.inverse : 0.f;
      found.q += unique(recipe.qk, quantized_of(recipe.qk, y)) != unique(recipe.qk, got_q[row * padded + c]);
    }
  }
  EXPECT_EQ(found.means, 0);
  EXPECT_EQ(found.v_channel_scales, 0);
  EXPECT_EQ(found.k_scales, 0);
  EXPECT_EQ(found.k, 0);
  EXPECT_EQ(found.v, 0);
  EXPECT_EQ(found.v_scales, 0);
  EXPECT_EQ(found.mean_logits, 0);
  EXPECT_EQ(found.q_scales, 0);
  EXPECT_EQ(found.q, 0);
}

std::string name_of(const testing::TestParamInfo<GpuQuantizedBitByBit::ParamType>& info) {
  constexpr const char* kElements[] = {"f32", "f16", "bf16", "e4m3"};
  const auto& [element, dim, recipe, layout] = info.param;
  return std::string(kElements[static_cast<int>(element)]) + '_' + std::to_string(dim) + '_' + recipe.name + '_' +
         layout.name;
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, GpuQuantizedBitByBit,
    testing::Combine(testing::Values(Element::bf16, Element::f16, Element::f32, Element::e4m3),
                     testing::Values(256, 192, 128, 64, 96, 40, 8),
                     testing::Values(Recipe{"int8_f16", QuantizedFormat::s8, QuantizedFormat::none, false, true},
                                     Recipe{"int8", QuantizedFormat::s8, QuantizedFormat::s8, false, true},
                                     Recipe{"int8_fp8", QuantizedFormat::s8, QuantizedFormat::e4m3, true, true},
                                     Recipe{"fp8", QuantizedFormat::e4m3, QuantizedFormat::e4m3, false, false},
                                     Recipe{"fp8_groups", QuantizedFormat::e4m3, QuantizedFormat::e4m3, true, false}),
                     testing::Values(Layout{"dense", {}, 2, 150, 333, false, false},
                                     Layout{"one_key", {}, 2, 70, 1, false, false},
                                     Layout{"packed", {0, 0, 100, 101, 101, 333}, 1, 333, 333, false, false},
                                     Layout{"gaps_poisoned", {}, 1, 1300, 1300, true, true},
                                     Layout{"poisoned", {}, 1, 1300, 1300, false, true},
                                     Layout{"outlier", {}, 1, 1300, 1300, false, false, {}, true},
                                     Layout{"window", {}, 2, 150, 333, false, false, {true, true, 20, 0}, true},
                                     Layout{"causal_window", {}, 2, 150, 633, false, true, {true, false, 60, 0}},
                                     Layout{"packed_window",
                                            {0, 0, 100, 101, 101, 333},
                                            1,
                                            333,
                                            333,
                                            false,
                                            false,
                                            {true, false, 1 << 20, 0},
                                            true})),
    name_of);

}  // namespace
}  // namespace octet::cuda
