// The safetensors format: 8 bytes with the length of a JSON header, the header, then the elements of all tensors.
// The reader accepts what the format's description allows and nothing else: each byte after the header belongs to
// exactly one tensor, names are unique, and sizes agree with shapes.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "array.h"
#include "io/atomic_file.h"
#include "io/file.h"

namespace octet::cli {

struct SafetensorsEntry {
  std::string dtype;  // as the file spells it
  std::vector<int64_t> shape;
  uint64_t first = 0, last = 0;  // bytes after the header: [first, last)
};
using SafetensorsHeader = std::map<std::string, SafetensorsEntry>;

// Validates the JSON text of a header against the number of bytes that follow it.
SafetensorsHeader parse_safetensors_header(std::string_view json, uint64_t data_bytes);

class Safetensors {
 public:
  explicit Safetensors(File file);

  const SafetensorsHeader& header() const { return header_; }
  Array read(const std::string& name) const;  // rejects absent names and dtypes unknown to the library

 private:
  File file_;
  SafetensorsHeader header_;
  uint64_t data_ = 0;  // offset of the first element in the file
};

struct NamedArray {
  std::string name;
  const Array* array;
};

void write_safetensors(AtomicFile& file, const std::vector<NamedArray>& arrays,
                       const std::map<std::string, std::string>& metadata);

}  // namespace octet::cli
