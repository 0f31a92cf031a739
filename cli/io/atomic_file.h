// A file that appears whole or not at all: written under a temporary name in the target's directory, flushed to the
// disk, then renamed. A file that is not committed leaves nothing behind, nor does a signal.
#pragma once
#include <cstddef>
#include <string>

namespace octet::cli {

class AtomicFile {
 public:
  explicit AtomicFile(std::string path);  // rejects paths that cannot be written
  AtomicFile(AtomicFile&& other) noexcept;
  ~AtomicFile();

  void write(const void* from, std::size_t bytes);
  void flush();   // everything written is on the disk; only the name is missing
  void commit();  // after flush, under hold_signals()

 private:
  std::string path_, temporary_;
  int descriptor_;
};

}  // namespace octet::cli
