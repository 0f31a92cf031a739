#include "support/tensors.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <octet/formats.hpp>
#include <random>
#include <sstream>
#include <type_traits>

namespace octet::test {

Values::Values(const Shape& s, double fill) : shape(s), data(static_cast<size_t>(s[0] * s[1] * s[2] * s[3]), fill) {}

Values normal(const Shape& shape, uint64_t seed, double mean, double deviation) {
  std::mt19937_64 bits(seed);
  std::normal_distribution<double> draw(mean, deviation);
  Values x(shape);
  for (double& value : x.data) value = draw(bits);
  return x;
}

Values rounded(Values x, DType dtype) {
  for (double& value : x.data) value = round_to(static_cast<octet_dtype>(dtype), value);
  return x;
}

Values slice(const Values& x, int dimension, int64_t first, int64_t last) {
  Shape shape = x.shape;
  shape[static_cast<size_t>(dimension)] = last - first;
  Values out(shape);
  int64_t from[4] = {0, 0, 0, 0};
  from[dimension] = first;
  for_each(shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
    out.at(b, h, t, c) = x.at(b + from[0], h + from[1], t + from[2], c + from[3]);
  });
  return out;
}

Values joined(const std::vector<Values>& parts, int dimension) {
  Shape shape = parts.front().shape;
  const auto along = static_cast<size_t>(dimension);
  shape[along] = 0;
  for (const Values& part : parts) shape[along] += part.shape[along];
  Values out(shape);
  int64_t to[4] = {0, 0, 0, 0};
  for (const Values& part : parts) {
    for_each(part.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
      out.at(b + to[0], h + to[1], t + to[2], c + to[3]) = part.at(b, h, t, c);
    });
    to[dimension] += part.shape[along];
  }
  return out;
}

Values combined(double a, const Values& x, double b, const Values& y) {
  Values out(x.shape);
  for (size_t i = 0; i < out.data.size(); ++i) out.data[i] = a * x.data[i] + b * y.data[i];
  return out;
}

double inner(const Values& x, const Values& y) {
  double sum = 0.0;
  for (size_t i = 0; i < x.data.size(); ++i) sum += x.data[i] * y.data[i];
  return sum;
}

double largest(const Values& x) {
  double most = 0.0;
  for (double value : x.data) most = std::max(most, std::fabs(value));
  return most;
}

double largest_row(const Values& x) {
  double most = 0.0;
  const auto dim = static_cast<size_t>(x.shape[3]);
  for (size_t row = 0; dim && row < x.data.size() / dim; ++row) {
    double square = 0.0;
    for (size_t c = 0; c < dim; ++c) square += x.data[row * dim + c] * x.data[row * dim + c];
    most = std::max(most, square);
  }
  return std::sqrt(most);
}

const char* name(Layout layout) {
  switch (layout) {
    case Layout::bhtd:
      return "bhtd";
    case Layout::bthd:
      return "bthd";
    case Layout::transposed:
      return "transposed";
    case Layout::padded:
      return "padded";
    case Layout::spaced:
      return "spaced";
    case Layout::broadcast:
      return "broadcast";
  }
  return "?";
}

size_t bytes_of(DType dtype) {
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

// Every float of such bytes is NaN.
constexpr unsigned char kNaNByte = 0xff;

Memory::Memory(size_t bytes, unsigned char pattern)
    : pattern_(pattern), bytes_(bytes + 2 * kGuard, pattern), claimed_(bytes_.size(), 0) {}

void Memory::claim(size_t offset, size_t size) {
  std::fill_n(claimed_.data() + kGuard + offset, size, 1);
  std::fill_n(data() + offset, size, kNaNByte);
}

std::string Memory::damage() const {
  for (size_t i = 0; i < bytes_.size(); ++i) {
    if (claimed_[i] || bytes_[i] == pattern_) continue;
    std::ostringstream out;
    out << "byte " << static_cast<int64_t>(i) - static_cast<int64_t>(kGuard) << " of " << bytes_.size() - 2 * kGuard
        << " is no element, but was overwritten with " << static_cast<int>(bytes_[i]);
    return out.str();
  }
  return {};
}

namespace {

struct Placement {
  Shape stride;
  int64_t offset = 0;
};

Placement place(const Shape& s, Layout layout) {
  switch (layout) {
    case Layout::bhtd:
      return {contiguous_strides(s)};
    case Layout::bthd:
      return {{s[2] * s[1] * s[3], s[3], s[1] * s[3], 1}};
    case Layout::transposed:
      return {{s[1] * s[3] * s[2], s[3] * s[2], 1, s[2]}};
    case Layout::padded: {
      const int64_t row = s[3] + 3, head = s[2] * row + 5;
      return {{s[1] * head + 7, head, row, 1}, 1};
    }
    case Layout::spaced: {
      const int64_t row = (s[3] + 15) / 8 * 8;
      return {{s[1] * s[2] * row, s[2] * row, row, 1}};
    }
    case Layout::broadcast:
      return {{0, s[2] * s[3], s[3], 1}};
  }
  return {};
}

int64_t reach(const Shape& shape, const Shape& stride) {
  int64_t last = 0;
  for (size_t i = 0; i < 4; ++i) {
    if (!shape[i]) return -1;
    last += (shape[i] - 1) * stride[i];
  }
  return last;
}

}  // namespace

Buffer::Buffer(DType dtype, const Shape& shape, Layout layout) {
  const Placement at = place(shape, layout);
  const auto elements = static_cast<size_t>(at.offset + reach(shape, at.stride) + 1);
  const auto memory = layout == Layout::spaced ? std::make_shared<Memory>(elements * bytes_of(dtype), kNaNByte)
                                               : std::make_shared<Memory>(elements * bytes_of(dtype));
  *this = Buffer(memory, dtype, shape, at.stride, at.offset);
}

Buffer::Buffer(const Values& values, DType dtype, Layout layout) : Buffer(dtype, values.shape, layout) { set(values); }

Buffer::Buffer(std::shared_ptr<Memory> memory, DType dtype, const Shape& shape, const Shape& stride, int64_t offset)
    : memory_(std::move(memory)), dtype_(dtype), shape_(shape), stride_(stride), offset_(offset) {
  const size_t size = bytes_of(dtype);
  const int64_t run = stride[3] == 1 ? std::max<int64_t>(shape[3], 1) : 1;  // elements side by side
  for_each({shape[0], shape[1], shape[2], shape[3] / run}, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
    const int64_t first = offset + b * stride[0] + h * stride[1] + t * stride[2] + c * stride[3];
    memory_->claim(static_cast<size_t>(first) * size, static_cast<size_t>(run) * size);
  });
}

Tensor Buffer::view() const {
  if (!memory_) return {};
  return Tensor(memory_->data() + static_cast<size_t>(offset_) * bytes_of(dtype_), dtype_, shape_, stride_);
}

namespace {

// Calls f with a dtype as a constant: a loop over elements then decides once which conversion it makes.
template <class F>
void with_constant(DType dtype, const F& f) {
  const auto with = [&]<octet_dtype constant> { f(std::integral_constant<octet_dtype, constant>{}); };
  switch (dtype) {
    case DType::f64:
      return with.template operator()<OCTET_F64>();
    case DType::f32:
      return with.template operator()<OCTET_F32>();
    case DType::f16:
      return with.template operator()<OCTET_F16>();
    case DType::bf16:
      return with.template operator()<OCTET_BF16>();
    default:
      f(static_cast<octet_dtype>(dtype));
  }
}

}  // namespace

Values Buffer::values() const {
  if (!memory_) return {};
  Values out(shape_);
  const Tensor v = view();
  with_constant(dtype_, [&](auto dtype) {
    double* to = out.data.data();
    for_each(shape_, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
      *to++ = load(dtype, v.data, b * stride_[0] + h * stride_[1] + t * stride_[2] + c * stride_[3]);
    });
  });
  return out;
}

void Buffer::set(const Values& values) {
  const Tensor v = view();
  with_constant(dtype_, [&](auto dtype) {
    for_each(shape_, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
      store(dtype, v.data, b * stride_[0] + h * stride_[1] + t * stride_[2] + c * stride_[3], values.at(b, h, t, c));
    });
  });
}

std::array<Buffer, 3> interleaved(DType dtype, const Shape& s) {
  const int64_t part = s[1] * s[3], token = 3 * part;
  const auto memory = std::make_shared<Memory>(static_cast<size_t>(s[0] * s[2] * token) * bytes_of(dtype));
  const Shape stride{s[2] * token, s[3], token, 1};
  return {Buffer(memory, dtype, s, stride, 0), Buffer(memory, dtype, s, stride, part),
          Buffer(memory, dtype, s, stride, 2 * part)};
}

Difference difference(const Values& got, const Values& want) {
  Difference d;
  double square = 0.0, norm = 0.0;
  double worst = -1.0;
  size_t where = 0;
  for (size_t i = 0; i < want.data.size(); ++i) {
    const double g = got.data[i], w = want.data[i];
    double error = g == w ? 0.0 : std::fabs(g - w);
    if (std::isnan(error)) error = std::numeric_limits<double>::infinity();
    square += error * error;
    if (std::isfinite(w)) norm += w * w;
    if (error > worst) worst = error, where = i;
  }
  if (want.data.empty()) return d;
  auto rest = static_cast<int64_t>(where);
  for (size_t dimension = 4; dimension-- > 0; rest /= want.shape[dimension])
    d.where[dimension] = rest % want.shape[dimension];
  d.got = got.data[where];
  d.want = want.data[where];
  d.largest = worst;
  d.rms = std::sqrt(square / static_cast<double>(want.data.size()));
  d.norm = std::sqrt(norm / static_cast<double>(want.data.size()));
  return d;
}

std::string text(const Difference& d) {
  std::ostringstream out;
  out.precision(9);
  out << '[' << d.where[0] << ", " << d.where[1] << ", " << d.where[2] << ", " << d.where[3] << "]: got " << d.got
      << ", want " << d.want;
  return out.str();
}

}  // namespace octet::test
