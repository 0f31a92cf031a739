// Tensors for tests: values (float64, dense) and buffers (an element type in some layout, between guard bytes).
//
// A buffer fills what is not an element with a pattern; `damage` finds a byte of it that changed. Buffers that a
// call may not write are compared byte by byte with a snapshot.
#pragma once
#include <cstddef>
#include <memory>
#include <octet/octet.hpp>
#include <string>
#include <vector>

namespace octet::test {

// Dense [batch, head, token, dim] numbers.
struct Values {
  Shape shape{0, 0, 0, 0};
  std::vector<double> data;

  Values() = default;
  explicit Values(const Shape& shape, double fill = 0.0);

  bool present() const { return shape[3] != 0; }
  int64_t index(int64_t b, int64_t h, int64_t t, int64_t c) const {
    return ((b * shape[1] + h) * shape[2] + t) * shape[3] + c;
  }
  double& at(int64_t b, int64_t h, int64_t t, int64_t c) { return data[static_cast<size_t>(index(b, h, t, c))]; }
  double at(int64_t b, int64_t h, int64_t t, int64_t c) const { return data[static_cast<size_t>(index(b, h, t, c))]; }
};

// Calls f(b, h, t, c) for every element of a shape, in order.
template <class F>
void for_each(const Shape& shape, const F& f) {
  for (int64_t b = 0; b < shape[0]; ++b)
    for (int64_t h = 0; h < shape[1]; ++h)
      for (int64_t t = 0; t < shape[2]; ++t)
        for (int64_t c = 0; c < shape[3]; ++c) f(b, h, t, c);
}

Values normal(const Shape& shape, uint64_t seed, double mean = 0.0, double deviation = 1.0);
Values rounded(Values x, DType dtype);
// x[first, last) along one dimension.
Values slice(const Values& x, int dimension, int64_t first, int64_t last);
// One after the other along a dimension.
Values joined(const std::vector<Values>& parts, int dimension);
Values combined(double a, const Values& x, double b, const Values& y);  // a x + b y
double inner(const Values& x, const Values& y);
double largest(const Values& x);      // of the magnitudes
double largest_row(const Values& x);  // of the euclidean norms of the rows

enum class Layout {
  bhtd,        // dense
  bthd,        // heads inside tokens
  transposed,  // token stride 1
  padded,      // odd strides everywhere, first element off alignment
  spaced,      // rows start at multiples of 8 elements, with at least 8 elements of NaN between them
  broadcast,   // batch stride 0, for inputs that are equal in every batch element
};
const char* name(Layout);

// Memory of one or more tensors: guard bytes around them, a pattern in the gaps between their elements.
class Memory {
 public:
  explicit Memory(size_t bytes, unsigned char pattern = 0xa5);
  unsigned char* data() { return bytes_.data() + kGuard; }
  // Marks [offset, offset + size) as an element.
  void claim(size_t offset, size_t size);
  // Empty, or where a byte that is no element lost its pattern.
  std::string damage() const;
  const std::vector<unsigned char>& bytes() const { return bytes_; }
  std::vector<unsigned char>& bytes() { return bytes_; }

 private:
  static constexpr size_t kGuard = 256;
  unsigned char pattern_;
  std::vector<unsigned char> bytes_;
  std::vector<unsigned char> claimed_;  // 1: part of an element
};

// An element type in a layout. New buffers hold NaN (floats) or 0xff.
class Buffer {
 public:
  Buffer() = default;  // absent
  Buffer(DType dtype, const Shape& shape, Layout layout = Layout::bhtd);
  Buffer(const Values& values, DType dtype, Layout layout = Layout::bhtd);
  // A part of memory that tensors share; strides and offset count elements.
  Buffer(std::shared_ptr<Memory> memory, DType dtype, const Shape& shape, const Shape& stride, int64_t offset);

  bool present() const { return memory_ != nullptr; }
  Tensor view() const;
  Values values() const;
  void set(const Values& values);
  std::string damage() const { return memory_ ? memory_->damage() : std::string(); }
  const std::vector<unsigned char>& bytes() const { return memory_->bytes(); }
  Memory* memory() const { return memory_.get(); }

 private:
  std::shared_ptr<Memory> memory_;
  DType dtype_ = DType::none;
  Shape shape_{0, 0, 0, 0}, stride_{0, 0, 0, 0};
  int64_t offset_ = 0;
};

// q, k and v of equal shapes interleaved in one buffer [batch, token, 3, head, dim].
std::array<Buffer, 3> interleaved(DType dtype, const Shape& shape);

size_t bytes_of(DType dtype);

// The difference between two tensors. Infinite values count as equal to themselves; NaN equals nothing.
struct Difference {
  double rms = 0.0;      // root mean square
  double largest = 0.0;  // of the magnitudes
  double norm = 0.0;     // of `want`, root mean square
  Shape where{0, 0, 0, 0};
  double got = 0.0, want = 0.0;  // at `where`
  double relative() const { return norm > 0.0 ? rms / norm : rms; }
};
Difference difference(const Values& got, const Values& want);

// "[0, 3, 17, 5]: got 1.5, want 1.25"
std::string text(const Difference& d);

}  // namespace octet::test
