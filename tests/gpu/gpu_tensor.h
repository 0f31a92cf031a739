// A tensor in the memory of a GPU, for calls that are repeated without going through the host.
#pragma once
#include <algorithm>
#include <vector>

#include "gpu/place.h"
#include "support/tensors.h"

namespace octet::test {

class GpuTensor {
 public:
  // Contiguous, and filled with one byte.
  GpuTensor(DType dtype, const Shape& shape, int byte) : GpuTensor(dtype, shape, contiguous_strides(shape)) {
    fill(byte);
  }
  // Elements without holes; what they hold is not defined.
  GpuTensor(DType dtype, const Shape& shape, const Shape& strides)
      : bytes_(bytes_of(dtype) * static_cast<size_t>(shape[0] * shape[1] * shape[2] * shape[3])) {
    check_cuda(cudaMalloc(&data_, std::max<size_t>(bytes_, 1)));
    view_ = Tensor(data_, dtype, shape, strides, Device::cuda);
  }
  GpuTensor(const GpuTensor&) = delete;
  GpuTensor& operator=(const GpuTensor&) = delete;
  ~GpuTensor() { cudaFree(data_); }

  void fill(int byte) {
    check_cuda(cudaMemset(data_, byte, bytes_));
    check_cuda(cudaDeviceSynchronize());
  }
  // Fills all memory with these bytes, repeated.
  void fill(const unsigned char* bytes, size_t count) {
    for (size_t at = 0; at < bytes_; at += count)
      check_cuda(cudaMemcpy(static_cast<unsigned char*>(data_) + at, bytes, std::min(count, bytes_ - at),
                            cudaMemcpyHostToDevice));
  }
  const Tensor& view() const { return view_; }
  template <class Word>
  std::vector<Word> words() const {
    std::vector<Word> x(bytes_ / sizeof(Word));
    check_cuda(cudaMemcpy(x.data(), data_, bytes_, cudaMemcpyDeviceToHost));
    return x;
  }

 private:
  size_t bytes_;
  void* data_ = nullptr;
  Tensor view_;
};

}  // namespace octet::test
