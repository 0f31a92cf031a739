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

double Array::operator[](int64_t index) const { return load(static_cast<octet_dtype>(dtype), bytes.data(), index); }

void Array::set(int64_t index, double value) { store(static_cast<octet_dtype>(dtype), bytes.data(), index, value); }

Shape Array::shape4(const std::string& label) const {
  if (shape.size() == 4) return {shape[0], shape[1], shape[2], shape[3]};
  if (shape.size() == 3) return {1, shape[0], shape[1], shape[2]};
  reject("{}: shape {}, expected [batch, head, token, dim] or [head, token, dim]", label, shape_text(shape));
}

Tensor Array::view() const {
  if (!present()) return {};
  return {const_cast<std::byte*>(bytes.data()), dtype, shape4()};
}

void fill_normal(Array& array, uint64_t seed) {
  // Box and Muller, because std::normal_distribution differs between standard libraries.
  std::mt19937_64 random(seed);
  const auto uniform = [&] { return (static_cast<double>(random() >> 11) + 0.5) * 0x1p-53; };
  const int64_t size = array.size();
  for (int64_t i = 0; i < size; i += 2) {
    const double radius = std::sqrt(-2.0 * std::log(uniform())), angle = 2.0 * std::numbers::pi * uniform();
    array.set(i, radius * std::cos(angle));
    if (i + 1 < size) array.set(i + 1, radius * std::sin(angle));
  }
}

}  // namespace octet::cli
