// A regular file opened for reading at any offset. What its content claims about sizes is never trusted: reads beyond
// the end are rejected.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace octet::cli {

class File {
 public:
  explicit File(const std::string& path);
  File(int descriptor, std::string label);  // takes over the descriptor
  File(File&& other) noexcept;
  ~File();

  const std::string& label() const { return label_; }  // for messages
  uint64_t size() const { return size_; }
  void read(uint64_t offset, void* to, std::size_t bytes) const;

 private:
  void validate();

  int descriptor_;
  std::string label_;
  uint64_t size_ = 0;
};

}  // namespace octet::cli
