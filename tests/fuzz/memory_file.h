// A file in memory, so that fuzzers go through the very code that reads files from a disk.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "io/file.h"

namespace octet::cli {

inline File memory_file(const uint8_t* data, std::size_t size) {
  const int descriptor = ::memfd_create("input", MFD_CLOEXEC);
  if (descriptor < 0 || ::write(descriptor, data, size) != static_cast<ssize_t>(size)) std::abort();
  return File(descriptor, "input");
}

// A broken promise ends the run, as a crash does.
inline void require(bool promise) {
  if (!promise) std::abort();
}

}  // namespace octet::cli
