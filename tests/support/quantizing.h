// Tensors with guard bytes and the quantizers on them, for tests of the C ABI.
#pragma once
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <octet/formats.hpp>
#include <octet/octet.hpp>
#include <random>
#include <vector>

namespace octet::quantizing {

enum class Layout { dense, token_major, transposed, padded };

inline Shape strides_of(Layout layout, const Shape& s) {
  switch (layout) {
    case Layout::token_major:
      return {s[2] * s[1] * s[3], s[3], s[1] * s[3], 1};
    case Layout::transposed:
      return {s[1] * s[2] * s[3], s[2] * s[3], 1, s[2]};
    case Layout::padded:
      return {s[1] * s[2] * (s[3] + 5) + 7, s[2] * (s[3] + 5), s[3] + 5, 1};
    default:
      return contiguous_strides(s);
  }
}

// A tensor that owns its memory. Everything but its elements (guards before and after, gaps between rows) is poisoned,
// as NaN in any floating-point type, and must stay so.
class Array {
 public:
  static constexpr int64_t kGuard = 64;
  static constexpr unsigned char kPoison = 0xff;

  Array() = default;
  Array(DType dtype, const Shape& shape, Layout layout = Layout::dense)
      : dtype_(static_cast<octet_dtype>(dtype)), shape_(shape), stride_(strides_of(layout, shape)) {
    int64_t last = 0;
    for (int i = 0; i < 4; ++i) last += (shape[i] - 1) * stride_[i];
    const bool empty = !shape[0] || !shape[1] || !shape[2] || !shape[3];
    elements_ = empty ? 0 : last + 1;
    bytes_.assign(2 * kGuard + elements_ * size(), kPoison);
  }

  int64_t size() const {
    return dtype_ == OCTET_F64 ? 8 : dtype_ == OCTET_F32 ? 4 : dtype_ == OCTET_F16 || dtype_ == OCTET_BF16 ? 2 : 1;
  }
  void* data() const { return const_cast<unsigned char*>(bytes_.data()) + kGuard; }
  Tensor tensor() const { return {data(), static_cast<DType>(dtype_), shape_, stride_}; }
  const Shape& shape() const { return shape_; }
  const std::vector<unsigned char>& bytes() const { return bytes_; }

  int64_t at(int64_t b, int64_t h, int64_t t, int64_t c) const {
    return b * stride_[0] + h * stride_[1] + t * stride_[2] + c * stride_[3];
  }
  double get(int64_t b, int64_t h, int64_t t, int64_t c) const { return load(dtype_, data(), at(b, h, t, c)); }
  void set(int64_t b, int64_t h, int64_t t, int64_t c, double v) { store(dtype_, data(), at(b, h, t, c), v); }

  void each(const std::function<void(int64_t, int64_t, int64_t, int64_t)>& body) const {
    for (int64_t b = 0; b < shape_[0]; ++b)
      for (int64_t h = 0; h < shape_[1]; ++h)
        for (int64_t t = 0; t < shape_[2]; ++t)
          for (int64_t c = 0; c < shape_[3]; ++c) body(b, h, t, c);
  }

  // Normal numbers of deviation `sigma` around `bias` times a direction per channel.
  Array& random(unsigned seed, double sigma = 1, double bias = 0) {
    std::mt19937_64 generator(seed);
    std::normal_distribution<double> normal;
    std::vector<double> direction(shape_[3]);
    for (double& d : direction) d = normal(generator);
    each([&](int64_t b, int64_t h, int64_t t, int64_t c) {
      set(b, h, t, c, sigma * normal(generator) + bias * direction[c]);
    });
    return *this;
  }

  // Returns whether only elements have been written.
  bool intact() const {
    std::vector<bool> element(bytes_.size(), false);
    each([&](int64_t b, int64_t h, int64_t t, int64_t c) {
      for (int64_t i = 0; i < size(); ++i) element[kGuard + at(b, h, t, c) * size() + i] = true;
    });
    for (std::size_t i = 0; i < bytes_.size(); ++i)
      if (!element[i] && bytes_[i] != kPoison) return false;
    return true;
  }

 private:
  octet_dtype dtype_ = OCTET_DTYPE_NONE;
  Shape shape_{}, stride_{};
  int64_t elements_ = 0;
  std::vector<unsigned char> bytes_;
};

// A request to quantize, and its results.
struct Recipe {
  DType codes = DType::i8;
  octet_operand operand = OCTET_OPERAND_K;
  octet_granularity granularity = OCTET_PER_TOKEN;
  int64_t block = 0;
  octet_zero_point zero_point = OCTET_SYMMETRIC;
  bool smooth = false;
  uint64_t seed = 0;
  octet_rope rope = OCTET_ROPE_INIT;
  const Array* norm_weight = nullptr;  // of the norm that the rope has
  bool statistics = true;
  Layout layout = Layout::dense;
};

// The rope of a recipe, with the weights that `weight` describes. None where it does nothing.
inline const octet_rope* rope_of(const Recipe& recipe, octet_rope& rope, const Tensor& weight) {
  rope = recipe.rope;
  if (recipe.norm_weight) rope.norm_weight = &weight;
  return rope.style || rope.norm ? &rope : nullptr;
}

struct Quantized {
  Recipe recipe;
  Array codes, scale, zero_point, mean, statistics;
  Tensor scale_view, zero_point_view, mean_view;
  octet_quantization quantization = OCTET_QUANTIZATION_INIT;

  Quantized(const Recipe& r, const Shape& s) : recipe(r) {
    int64_t groups = 0;
    check(octet_scale_groups(r.operand, r.granularity, r.block, s[2], &groups));
    const bool channel = r.granularity == OCTET_PER_CHANNEL;
    const Shape scales{s[0], s[1], groups, channel ? s[3] : 1};
    codes = Array(r.codes, s, r.layout);
    scale = Array(DType::f32, scales);
    if (r.zero_point) zero_point = Array(DType::f32, scales);
    mean = Array(DType::f32, {s[0], s[1], 1, s[3]});
    statistics = Array(DType::f32, {s[0], s[1], 1, OCTET_STATISTICS});
    quantization.operand = r.operand, quantization.granularity = r.granularity,
    quantization.zero_point_kind = r.zero_point;
    quantization.block = r.block, quantization.hadamard_seed = r.seed;
    scale_view = scale.tensor(), mean_view = mean.tensor();
    quantization.scale = &scale_view;
    if (r.zero_point) zero_point_view = zero_point.tensor(), quantization.zero_point = &zero_point_view;
    if (r.smooth) quantization.mean = &mean_view;
  }
  Quantized(const Quantized&) = delete;

  Tensor codes_view() const {
    Tensor t = codes.tensor();
    t.quantization = &quantization;
    return t;
  }

  // Row of `scale` of a token, written as octet.h and SageAttention 2 describe it.
  int64_t group(int64_t t) const {
    switch (recipe.granularity) {
      case OCTET_PER_TOKEN:
        return t;
      case OCTET_PER_BLOCK:
        return t / recipe.block;
      case OCTET_PER_THREAD:
        if (recipe.operand == OCTET_OPERAND_Q) return 8 * (t / 32) + t % 8;
        return 4 * (t / 64) + (t % 8) / 2;
      default:
        return 0;
    }
  }
  double step(int64_t b, int64_t h, int64_t t, int64_t c) const {
    return scale.get(b, h, group(t), recipe.granularity == OCTET_PER_CHANNEL ? c : 0);
  }
  double zero(int64_t b, int64_t h, int64_t t, int64_t c) const {
    return recipe.zero_point ? zero_point.get(b, h, group(t), recipe.granularity == OCTET_PER_CHANNEL ? c : 0) : 0.0;
  }
  double statistic(int64_t b, int64_t h, int which) const { return statistics.get(b, h, 0, which); }

  // The number that a code stands for, before rotation and mean are undone.
  double value(int64_t b, int64_t h, int64_t t, int64_t c) const {
    const double code = codes.get(b, h, t, c), s = step(b, h, t, c), z = zero(b, h, t, c);
    return recipe.zero_point == OCTET_ZERO_POINT_FLOAT ? s * code + z : s * (code - z);
  }
};

inline std::unique_ptr<Quantized> quantized(const Array& x, const Recipe& recipe) {
  auto q = std::make_unique<Quantized>(recipe, x.shape());
  const Tensor in = x.tensor();
  Tensor codes = q->codes_view(), statistics = q->statistics.tensor();
  const Tensor weight = recipe.norm_weight ? recipe.norm_weight->tensor() : Tensor();
  octet_rope rope;
  check(octet_quantize(&in, rope_of(recipe, rope, weight), &codes, recipe.statistics ? &statistics : nullptr, nullptr));
  return q;
}

inline Array dequantized(const Quantized& q, DType dtype = DType::f32, Layout layout = Layout::dense) {
  Array out(dtype, q.codes.shape(), layout);
  const Tensor codes = q.codes_view();
  Tensor x = out.tensor();
  check(octet_dequantize(&codes, &x, nullptr));
  return out;
}

}  // namespace octet::quantizing
