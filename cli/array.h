// An array in host memory that owns its elements: what files hold and what the command lends to the library.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <octet/octet.hpp>
#include <optional>
#include <string>
#include <vector>

namespace octet::cli {

std::size_t bytes_of(DType dtype);

// "[1, 8, 2048, 128]"
std::string shape_text(const std::vector<int64_t>& shape);

// Elements of a shape, or nothing if they, counted with zero dimensions as one, overflow: then strides do too.
std::optional<int64_t> elements_of(const std::vector<int64_t>& shape);

// The order of the axes in memory and in `shape`: [batch, head, token, dim] or [batch, token, head, dim].
enum class Layout { bhsd, bshd };

struct Array {
  DType dtype = DType::none;
  std::vector<int64_t> shape;
  Layout layout = Layout::bhsd;
  std::vector<std::byte> bytes;

  Array() = default;
  Array(DType dtype, std::vector<int64_t> shape);  // zeros; the shape must have elements_of
  Array(DType dtype, const Shape& shape) : Array(dtype, std::vector<int64_t>(shape.begin(), shape.end())) {}
  Array(DType dtype, const Shape& shape, Layout layout);  // the shape as shape4 gives it

  bool present() const { return dtype != DType::none; }
  int64_t size() const { return static_cast<int64_t>(bytes.size() / bytes_of(dtype)); }
  double operator[](int64_t index) const;
  void set(int64_t index, double value);  // rounded to dtype

  // [batch, head, token, dim], whatever the layout; three dimensions are one batch. Rejects other ranks, calling the
  // array `label`.
  Shape shape4(const std::string& label = "array") const;

  // For the library, which writes through views of outputs only. Absent arrays give absent tensors.
  Tensor view() const;
};

// "[batch 2, head 4, token 33, dim 16]", in the order of the layout.
std::string axes_text(const Array& array);

// The array with `dim` elements in its last dimension: others are cut off, missing ones are 0.
Array with_last(const Array& array, int64_t dim);

// Fills with N(0, 1) numbers that depend on `seed` and nothing else. After `period` of them they begin again.
void fill_normal(Array& array, uint64_t seed, int64_t period = std::numeric_limits<int64_t>::max());

}  // namespace octet::cli
