// Any bytes as a .npy file: rejected in one line, or read with as many elements as its shape says.
#include <string_view>

#include "error.h"
#include "io/npy.h"
#include "memory_file.h"

using namespace octet::cli;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  try {
    const Array array = read_npy(memory_file(data, size));
    require(array.size() == *elements_of(array.shape));
    require(array.bytes.size() < size);
  } catch (const Rejection& rejection) {
    require(std::string_view(rejection.what()).find('\n') == std::string_view::npos);
  }
  return 0;
}
