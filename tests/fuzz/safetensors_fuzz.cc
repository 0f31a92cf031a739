// Any bytes as a .safetensors file: rejected in one line, or read with every byte of data in exactly one tensor.
#include <cstring>
#include <string_view>

#include "error.h"
#include "io/safetensors.h"
#include "memory_file.h"

using namespace octet::cli;

namespace {

void read_all(const uint8_t* data, std::size_t size) {
  const Safetensors file(memory_file(data, size));
  uint64_t length = 0, total = 0;
  std::memcpy(&length, data, 8);
  for (const auto& [name, entry] : file.header()) {
    total += entry.last - entry.first;
    try {
      const Array array = file.read(name);
      require(array.bytes.size() == entry.last - entry.first);
      require(array.size() == *elements_of(entry.shape));
    } catch (const Rejection&) {  // a dtype that only the format knows
    }
  }
  require(total == size - 8 - length);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  try {
    read_all(data, size);
  } catch (const Rejection& rejection) {
    require(std::string_view(rejection.what()).find('\n') == std::string_view::npos);
  }
  return 0;
}
