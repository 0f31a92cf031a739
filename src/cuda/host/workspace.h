// Allocates arrays in the caller's workspace. With a null workspace it only counts their bytes.
#pragma once
#include <cstddef>

namespace octet::cuda {

class WorkspaceAllocator {
 public:
  explicit WorkspaceAllocator(void* workspace) : base_(static_cast<unsigned char*>(workspace)) {}

  // Returns `bytes` bytes at a multiple of 256 from the start of the workspace, which is itself a multiple of 64.
  void* take(std::size_t bytes) {
    unsigned char* at = base_ ? base_ + used_ : nullptr;
    used_ += (bytes + 255) / 256 * 256;
    return at;
  }
  template <class T>
  T* take(std::size_t count) {
    return static_cast<T*>(take(count * sizeof(T)));
  }
  std::size_t used() const { return used_; }

 private:
  unsigned char* base_;
  std::size_t used_ = 0;
};

}  // namespace octet::cuda
