// Reading and writing .npy.
#include "io/npy.h"

#include <cctype>
#include <cstring>

#include "error.h"

namespace octet::cli {
namespace {

constexpr char kMagic[] = {'\x93', 'N', 'U', 'M', 'P', 'Y'};
constexpr std::size_t kMaxHeader = 65536;
constexpr std::size_t kMaxRank = 32;  // NumPy's own limit was 32 for long, then 64

struct Descriptor {
  const char* text;
  DType dtype;
};
// The first of each dtype is what write_npy writes.
constexpr Descriptor kDescriptors[] = {
    {"<f8", DType::f64}, {"<f4", DType::f32}, {"<f2", DType::f16}, {"<V2", DType::bf16},    {"|V2", DType::bf16},
    {"|i1", DType::i8},  {"|u1", DType::u8},  {"<i4", DType::i32}, {"|b1", DType::boolean}, {"|i1", DType::i4}};

const char* descriptor_of(DType dtype) {
  for (const Descriptor& d : kDescriptors)
    if (d.dtype == dtype) return d.text;
  return nullptr;
}

DType dtype_of(const std::string& text) {
  for (const Descriptor& d : kDescriptors)
    if (text == d.text) return d.dtype;
  // Codes are written, and read only to be rejected as tensors of attention.
  reject("header: unknown dtype '{}', allowed: <f8, <f4, <f2, <V2 (bf16)", text);
}

// A reader of the one kind of Python literal that a header holds:
// {'descr': '<f4', 'fortran_order': False, 'shape': (1, 2, 3), }
class Literal {
 public:
  explicit Literal(std::string_view text) : text_(text) {}

  bool take(char c) {
    skip_spaces();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) wrong(fmt::format("'{}'", c));
  }
  std::string string() {
    skip_spaces();
    const char quote = at_ < text_.size() ? text_[at_] : '\0';
    if (quote != '\'' && quote != '"') wrong("a string (structured types are not read)");
    const std::size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos || end - at_ > 64) wrong("a short string");
    std::string value(text_.substr(at_ + 1, end - at_ - 1));
    for (const char c : value)
      if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e) wrong("a printable string");
    at_ = end + 1;
    return value;
  }
  bool boolean() {
    skip_spaces();
    for (const auto& [word, value] : {std::pair{std::string_view("True"), true}, {std::string_view("False"), false}})
      if (text_.substr(at_, word.size()) == word) {
        at_ += word.size();
        return value;
      }
    wrong("True or False");
  }
  std::vector<int64_t> shape() {
    std::vector<int64_t> out;
    expect('(');
    while (!take(')')) {
      if (out.size() == kMaxRank) reject("header: more than {} dimensions", kMaxRank);
      out.push_back(dimension());
      if (!take(',')) {
        expect(')');
        break;
      }
    }
    return out;
  }
  void expect_end() {
    skip_spaces();
    if (at_ != text_.size()) wrong("the end");
  }

 private:
  void skip_spaces() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  int64_t dimension() {
    skip_spaces();
    const std::size_t first = at_;
    int64_t value = 0;
    for (; at_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[at_])); ++at_)
      if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, text_[at_] - '0', &value))
        reject("header: a dimension beyond 2^63");
    if (at_ == first) wrong("a dimension of 0 or more");
    return value;
  }
  [[noreturn]] void wrong(const std::string& expected) const {
    reject("header: expected {} at byte {}", expected, at_);
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

NpyHeader parse_npy_header(std::string_view text) {
  Literal literal(text);
  NpyHeader header;
  bool descr = false, order = false, shape = false;
  literal.expect('{');
  while (!literal.take('}')) {
    const std::string key = literal.string();
    bool* seen = key == "descr" ? &descr : key == "fortran_order" ? &order : key == "shape" ? &shape : nullptr;
    if (!seen) reject("header: unknown key '{}', allowed: descr, fortran_order, shape", key);
    if (*seen) reject("header: '{}' occurs twice", key);
    *seen = true;
    literal.expect(':');
    if (seen == &descr) header.dtype = dtype_of(literal.string());
    if (seen == &shape) header.shape = literal.shape();
    if (seen == &order && literal.boolean()) reject("Fortran order; save it with numpy.ascontiguousarray");
    if (!literal.take(',')) {
      literal.expect('}');
      break;
    }
  }
  literal.expect_end();
  if (!descr || !order || !shape) reject("header: no {}", !descr ? "descr" : !order ? "fortran_order" : "shape");
  return header;
}

Array read_npy(const File& file) {
  unsigned char prefix[12];
  const auto validated_size = [&](uint64_t wanted) {
    if (file.size() < wanted) reject("{}: truncated: {} bytes, too few for a .npy header", file.label(), file.size());
  };
  validated_size(10);
  file.read(0, prefix, 10);
  if (std::memcmp(prefix, kMagic, sizeof kMagic) != 0) reject("{}: not a .npy file", file.label());
  const int version = prefix[6];
  if (version < 1 || version > 3 || prefix[7] != 0)
    reject("{}: .npy version {}.{}, allowed: 1.0, 2.0, 3.0", file.label(), version, prefix[7]);
  std::size_t length = prefix[8] | prefix[9] << 8, begin = 10;
  if (version > 1) {
    validated_size(12);
    file.read(0, prefix, 12);
    length |= static_cast<std::size_t>(prefix[10]) << 16 | static_cast<std::size_t>(prefix[11]) << 24;
    begin = 12;
  }
  if (length > kMaxHeader) reject("{}: header of {} bytes, allowed: up to {}", file.label(), length, kMaxHeader);
  validated_size(begin + length);
  std::string text(length, '\0');
  file.read(begin, text.data(), length);
  const NpyHeader header = [&] {
    try {
      return parse_npy_header(text);
    } catch (const Rejection& rejection) {
      reject("{}: {}", file.label(), rejection.what());
    }
  }();
  const uint64_t data = file.size() - begin - length;
  const auto elements = elements_of(header.shape);
  uint64_t bytes = 0;
  if (!elements || __builtin_mul_overflow(static_cast<uint64_t>(*elements), bytes_of(header.dtype), &bytes))
    reject("{}: shape {}, more elements than memory can hold", file.label(), shape_text(header.shape));
  if (bytes != data)
    reject("{}: {}: shape {} needs {} bytes, but {} follow the header", file.label(),
           bytes > data ? "truncated" : "too long", shape_text(header.shape), bytes, data);
  Array array(header.dtype, header.shape);
  file.read(begin + length, array.bytes.data(), array.bytes.size());
  return array;
}

void expect_npy_dtype(const std::string& name, DType dtype) {
  if (!descriptor_of(dtype))
    reject("{}: .npy has no type for 8-bit floats; write a .safetensors file, or choose another --out-dtype", name);
}

void write_npy(AtomicFile& file, const Array& array) {
  std::string shape;
  for (const int64_t extent : array.shape) shape += fmt::format("{}, ", extent);
  std::string text =
      fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}", descriptor_of(array.dtype), shape);
  text.resize((text.size() + 1 + 10 + 63) / 64 * 64 - 10, ' ');  // elements begin at a multiple of 64
  text.back() = '\n';
  const auto length = static_cast<uint16_t>(text.size());
  const unsigned char version_and_length[] = {1, 0, static_cast<unsigned char>(length),
                                              static_cast<unsigned char>(length >> 8)};
  file.write(kMagic, sizeof kMagic);
  file.write(version_and_length, sizeof version_and_length);
  file.write(text.data(), text.size());
  file.write(array.bytes.data(), array.bytes.size());
}

}  // namespace octet::cli
