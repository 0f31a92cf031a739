// An array on the GPU, for tests.
#pragma once

#include <vector>

#include "../ladder.h"

namespace ladder {

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) : size_(values.size()) {
    check(cudaMalloc(&data_, size_ * sizeof(T)), "cudaMalloc");
    check(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), "upload");
  }
  explicit DeviceArray(size_t size) : DeviceArray(std::vector<T>(size)) {}
  DeviceArray(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }
  T* get() const { return data_; }
  // Waits for the GPU.
  std::vector<T> values() const {
    std::vector<T> result(size_);
    check(cudaMemcpy(result.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost), "download");
    return result;
  }

 private:
  T* data_ = nullptr;
  size_t size_;
};

// Numbers between -1 and 1 without a pattern that a kernel could get right by accident.
inline std::vector<float> numbers(size_t count, unsigned seed) {
  std::vector<float> x(count);
  for (float& value : x) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<float>(seed >> 8) * 0x1p-23f - 1;
  }
  return x;
}

}  // namespace ladder
