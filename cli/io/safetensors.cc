// Reading and writing safetensors. The header is parsed as a stream of events, so that hostile JSON (deep nesting,
// millions of values) is rejected at its first wrong token and never built in memory.
#include "io/safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "error.h"

namespace octet::cli {
namespace {

using json = nlohmann::json;

constexpr uint64_t kMaxHeader = 100'000'000;  // the format's own limit
constexpr std::size_t kMaxRank = 16;

struct FileType {
  const char* text;
  DType dtype;  // none: known to the format, not to the library
  uint64_t bytes;
};
constexpr FileType kFileTypes[] = {
    {"F64", DType::f64, 8},      {"F32", DType::f32, 4},      {"F16", DType::f16, 2},  {"BF16", DType::bf16, 2},
    {"F8_E4M3", DType::e4m3, 1}, {"F8_E5M2", DType::e5m2, 1}, {"I8", DType::i8, 1},    {"U8", DType::u8, 1},
    {"I32", DType::i32, 4},      {"BOOL", DType::boolean, 1}, {"I64", DType::none, 8}, {"U64", DType::none, 8},
    {"U32", DType::none, 4},     {"I16", DType::none, 2},     {"U16", DType::none, 2}};
constexpr const char* kReadTypes = "F64, F32, F16, BF16, F8_E4M3";  // those that tensors of attention may have

const FileType* file_type(std::string_view text) {
  const auto* found =
      std::find_if(std::begin(kFileTypes), std::end(kFileTypes), [&](const FileType& t) { return text == t.text; });
  return found == std::end(kFileTypes) ? nullptr : found;
}

const char* file_type_of(DType dtype) {
  if (dtype == DType::i4) return "I8";  // a code per byte
  for (const FileType& t : kFileTypes)
    if (t.dtype == dtype) return t.text;
  return nullptr;
}

// {"name": {"dtype": "F32", "shape": [..], "data_offsets": [first, last]}, .., "__metadata__": {"key": "value"}}
class HeaderParser : public nlohmann::json_sax<json> {
 public:
  SafetensorsHeader take() { return std::move(header_); }

  bool start_object(std::size_t) override {
    if (at_ == At::start) return go(At::names);
    if (at_ == At::name) return go(in_metadata() ? At::metadata : At::fields);
    wrong("an object");
  }
  bool end_object() override {
    if (at_ == At::names) return go(At::end);
    if (at_ == At::fields)
      finish_tensor();
    else if (at_ != At::metadata)
      wrong("the end of an object");
    return go(At::names);
  }
  bool key(string_t& text) override {
    if (at_ == At::names) {
      if (!names_.insert(text).second) reject("header: \"{}\" occurs twice", printable(text));
      name_ = text;
      fields_.clear();
      return go(At::name);
    }
    if (!fields_.insert(text).second)
      reject("header: \"{}\" occurs twice in \"{}\"", printable(text), printable(name_));
    if (at_ == At::metadata) return go(At::metadata_value);
    if (text == "dtype") return go(At::dtype);
    if (text == "shape") return go(At::shape);
    if (text == "data_offsets") return go(At::offsets);
    reject("header: tensor \"{}\" has a field \"{}\", allowed: dtype, shape, data_offsets", printable(name_),
           printable(text));
  }
  bool string(string_t& text) override {
    if (at_ == At::metadata_value) return go(At::metadata);
    if (at_ != At::dtype) wrong("a string");
    if (!file_type(text))
      reject("header: tensor \"{}\" has the unknown dtype \"{}\", allowed: {}", printable(name_), printable(text),
             kReadTypes);
    header_[name_].dtype = text;
    return go(At::fields);
  }
  bool start_array(std::size_t) override {
    if (at_ == At::shape) return go(At::shape_value);
    if (at_ == At::offsets) return go(At::offset_value);
    wrong("an array");
  }
  bool end_array() override {
    if (at_ == At::offset_value && offsets_.size() != 2)
      reject("header: tensor \"{}\" has {} data_offsets, expected 2", printable(name_), offsets_.size());
    return go(At::fields);
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (at_ == At::shape_value) {
      auto& shape = header_[name_].shape;
      if (shape.size() == kMaxRank)
        reject("header: tensor \"{}\" has more than {} dimensions", printable(name_), kMaxRank);
      if (value > INT64_MAX) reject("header: tensor \"{}\" has a dimension of {}", printable(name_), value);
      shape.push_back(static_cast<int64_t>(value));
    } else if (at_ == At::offset_value) {
      if (offsets_.size() == 2) reject("header: tensor \"{}\" has more than 2 data_offsets", printable(name_));
      offsets_.push_back(value);
    } else {
      wrong("a number");
    }
    return true;
  }
  bool number_integer(number_integer_t value) override {
    if (at_ == At::shape_value || at_ == At::offset_value)
      reject("header: tensor \"{}\" has the negative {} {}", printable(name_),
             at_ == At::shape_value ? "dimension" : "offset", value);
    wrong("a number");
  }
  bool number_float(number_float_t, const string_t& text) override {
    reject("header: found the number {}, expected a whole number below 2^64", printable(text));
  }
  bool null() override { wrong("null"); }
  bool boolean(bool) override { wrong("true or false"); }
  bool binary(binary_t&) override { wrong("binary data"); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    reject("header: not JSON: error at byte {}", position);
  }

 private:
  enum class At {
    start,
    names,
    name,
    metadata,
    metadata_value,
    fields,
    dtype,
    shape,
    shape_value,
    offsets,
    offset_value,
    end
  };

  bool go(At next) {
    if (next == At::offset_value) offsets_.clear();
    at_ = next;
    return true;
  }
  bool in_metadata() const { return name_ == "__metadata__"; }

  // Names come from the file: keep a message on one line of bearable length.
  static std::string printable(const std::string& text) {
    std::string out;
    for (const char c : text.substr(0, 64)) out += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
    return text.size() > 64 ? out + "..." : out;
  }

  [[noreturn]] void wrong(const char* found) const {
    static constexpr const char* kExpected[] = {
        "an object", "a tensor's name", "an object with dtype, shape, data_offsets",
        "a key",     "a string",        "dtype, shape or data_offsets",
        "a string",  "an array",        "a whole number",
        "an array",  "a whole number",  "the end"};
    reject("header: found {}{}, expected {}", found, name_.empty() ? "" : fmt::format(" in \"{}\"", printable(name_)),
           kExpected[static_cast<int>(at_)]);
  }

  void finish_tensor() {
    for (const char* field : {"dtype", "shape", "data_offsets"})
      if (!fields_.count(field)) reject("header: tensor \"{}\" has no {}", printable(name_), field);
    SafetensorsEntry& entry = header_[name_];
    entry.first = offsets_[0], entry.last = offsets_[1];
    if (entry.first > entry.last)
      reject("header: tensor \"{}\" ends at byte {}, before its begin at {}", printable(name_), entry.last,
             entry.first);
    const auto elements = elements_of(entry.shape);
    uint64_t bytes = 0;
    if (!elements || __builtin_mul_overflow(static_cast<uint64_t>(*elements), file_type(entry.dtype)->bytes, &bytes))
      reject("header: tensor \"{}\" has shape {}, more elements than memory can hold", printable(name_),
             shape_text(entry.shape));
    if (bytes != entry.last - entry.first)
      reject("header: tensor \"{}\" of shape {} and dtype {} needs {} bytes, but its data_offsets hold {}",
             printable(name_), shape_text(entry.shape), entry.dtype, bytes, entry.last - entry.first);
  }

  At at_ = At::start;
  std::string name_;
  std::set<std::string> names_, fields_;
  std::vector<uint64_t> offsets_;
  SafetensorsHeader header_;
};

// Every byte belongs to one tensor: sorted by offset, each begins where the one before ends.
void validate_layout(const SafetensorsHeader& header, uint64_t data_bytes) {
  std::vector<const SafetensorsHeader::value_type*> entries;
  for (const auto& entry : header) entries.push_back(&entry);
  std::sort(entries.begin(), entries.end(), [](const auto* a, const auto* b) {
    return std::pair(a->second.first, a->second.last) < std::pair(b->second.first, b->second.last);
  });
  uint64_t end = 0;
  for (const auto* entry : entries) {
    const auto& [name, e] = *entry;
    if (e.last > data_bytes)
      reject("tensor \"{}\" ends at byte {}, but the file holds {} bytes of data", name, e.last, data_bytes);
    if (e.first < end)
      reject("tensor \"{}\" begins at byte {}, inside another tensor that ends at {}", name, e.first, end);
    if (e.first > end) reject("bytes {} to {} belong to no tensor", end, e.first);
    end = e.last;
  }
  if (end != data_bytes) reject("bytes {} to {} belong to no tensor", end, data_bytes);
}

uint64_t little_endian(const unsigned char (&bytes)[8]) {
  uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | bytes[i];
  return value;
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view text, uint64_t data_bytes) {
  if (text.empty() || text.front() != '{') reject("header: does not begin with {{");
  HeaderParser parser;
  json::sax_parse(text, &parser);
  SafetensorsHeader header = parser.take();
  validate_layout(header, data_bytes);
  return header;
}

Safetensors::Safetensors(File file) : file_(std::move(file)) {
  if (file_.size() < 8)
    reject("{}: truncated: {} bytes, too few for a safetensors header", file_.label(), file_.size());
  unsigned char prefix[8];
  file_.read(0, prefix, sizeof prefix);
  const uint64_t length = little_endian(prefix);
  if (length > kMaxHeader) reject("{}: header of {} bytes, allowed: up to {}", file_.label(), length, kMaxHeader);
  if (length > file_.size() - 8)
    reject("{}: truncated: header of {} bytes, but the file has {}", file_.label(), length, file_.size());
  std::string text(length, '\0');
  file_.read(8, text.data(), text.size());
  data_ = 8 + length;
  try {
    header_ = parse_safetensors_header(text, file_.size() - data_);
  } catch (const Rejection& rejection) {
    reject("{}: {}", file_.label(), rejection.what());
  }
}

Array Safetensors::read(const std::string& name) const {
  const auto found = header_.find(name);
  if (found == header_.end()) reject("{}: no tensor \"{}\"", file_.label(), name);
  const SafetensorsEntry& entry = found->second;
  const FileType* type = file_type(entry.dtype);
  if (type->dtype == DType::none)
    reject("{}: tensor \"{}\" has dtype {}, allowed: {}", file_.label(), name, entry.dtype, kReadTypes);
  Array array(type->dtype, entry.shape);
  file_.read(data_ + entry.first, array.bytes.data(), array.bytes.size());
  return array;
}

void write_safetensors(AtomicFile& file, const std::vector<NamedArray>& arrays,
                       const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t offset = 0;
  for (const auto& [name, array] : arrays) {
    const uint64_t end = offset + array->bytes.size();
    header[name] = {{"dtype", file_type_of(array->dtype)}, {"shape", array->shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // elements begin at a multiple of 8
  unsigned char prefix[8];
  for (int i = 0; i < 8; ++i) prefix[i] = static_cast<unsigned char>(text.size() >> (8 * i));
  file.write(prefix, sizeof prefix);
  file.write(text.data(), text.size());
  for (const auto& [name, array] : arrays) file.write(array->bytes.data(), array->bytes.size());
}

}  // namespace octet::cli
