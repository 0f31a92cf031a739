// Arrays in host memory.
#include "array.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <octet/formats.hpp>
#include <random>

#include "error.h"

namespace octet::cli {

std::size_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    default:
      return 1;
  }
}

std::string shape_text(const std::vector<int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

std::optional<int64_t> elements_of(const std::vector<int64_t>& shape) {
  int64_t product = 1;
  bool empty = false;
  for (const int64_t extent : shape) {
    empty |= extent == 0;
    if (__builtin_mul_overflow(product, std::max<int64_t>(extent, 1), &product)) return std::nullopt;
  }
  return empty ? 0 : product;
}

Array::Array(DType type, std::vector<int64_t> extents) : dtype(type), shape(std::move(extents)) {
  const auto elements = elements_of(shape);
  std::size_t size = 0;
  if (!elements || __builtin_mul_overflow(static_cast<std::size_t>(*elements), bytes_of(dtype), &size))
    reject("shape {}: more elements than memory can hold", shape_text(shape));
  bytes.resize(size);
}

Array::Array(DType type, const Shape& s, Layout order)
    : Array(type, order == Layout::bhsd ? s : Shape{s[0], s[2], s[1], s[3]}) {
  layout = order;
}

double Array::operator[](int64_t index) const { return load(static_cast<octet_dtype>(dtype), bytes.data(), index); }

void Array::set(int64_t index, double value) { store(static_cast<octet_dtype>(dtype), bytes.data(), index, value); }

Shape Array::shape4(const std::string& label) const {
  const bool by_head = layout == Layout::bhsd;
  if (shape.size() != 3 && shape.size() != 4)
    reject("{}: shape {}, expected [batch, {}, dim] or [{}, dim]", label, shape_text(shape),
           by_head ? "head, token" : "token, head", by_head ? "head, token" : "token, head");
  const int64_t batch = shape.size() == 4 ? shape[0] : 1, *rest = shape.data() + shape.size() - 3;
  return {batch, rest[by_head ? 0 : 1], rest[by_head ? 1 : 0], rest[2]};
}

Tensor Array::view() const {
  if (!present()) return {};
  const Shape s = shape4();
  const Shape stride = layout == Layout::bhsd ? contiguous_strides(s) : Shape{s[1] * s[2] * s[3], s[3], s[1] * s[3], 1};
  return {const_cast<std::byte*>(bytes.data()), dtype, s, stride};
}

std::string axes_text(const Array& array) {
  const Shape s = array.shape4();
  const std::string head = fmt::format("head {}", s[1]), token = fmt::format("token {}", s[2]);
  const bool by_head = array.layout == Layout::bhsd;
  return fmt::format("[batch {}, {}, {}, dim {}]", s[0], by_head ? head : token, by_head ? token : head, s[3]);
}

Array with_last(const Array& array, int64_t dim) {
  if (array.shape.back() == dim) return array;
  std::vector<int64_t> shape = array.shape;
  shape.back() = dim;
  Array out(array.dtype, std::move(shape));
  out.layout = array.layout;
  const std::size_t size = bytes_of(array.dtype), from = static_cast<std::size_t>(array.shape.back()) * size,
                    to = static_cast<std::size_t>(dim) * size;
  for (std::size_t row = 0; to && row < out.bytes.size() / to; ++row)
    std::copy_n(array.bytes.begin() + static_cast<std::ptrdiff_t>(row * from), std::min(from, to),
                out.bytes.begin() + static_cast<std::ptrdiff_t>(row * to));
  return out;
}

void fill_normal(Array& array, uint64_t seed, int64_t period) {
  // Box and Muller, because std::normal_distribution differs between standard libraries.
  std::mt19937_64 random(seed);
  const auto uniform = [&] { return (static_cast<double>(random() >> 11) + 0.5) * 0x1p-53; };
  const int64_t size = std::min(array.size(), period);
  for (int64_t i = 0; i < size; i += 2) {
    const double radius = std::sqrt(-2.0 * std::log(uniform())), angle = 2.0 * std::numbers::pi * uniform();
    array.set(i, radius * std::cos(angle));
    if (i + 1 < size) array.set(i + 1, radius * std::sin(angle));
  }
  const std::size_t all = array.bytes.size();
  for (std::size_t done = static_cast<std::size_t>(size) * bytes_of(array.dtype); done && done < all; done *= 2)
    std::copy_n(array.bytes.data(), std::min(done, all - done), array.bytes.data() + done);
}

}  // namespace octet::cli
