// The memory of a GPU as a place where the cases run: each buffer of the host is copied there with its guards, and
// back.
#pragma once
#include <cuda_runtime_api.h>

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/cases.h"

namespace octet::test {

inline void check_cuda(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

class GpuPlace : public Place {
 public:
  explicit GpuPlace(int device = 0) : device_(device) {
    check_cuda(cudaSetDevice(device));
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~GpuPlace() override {
    for (const auto& [host, copy] : copies_) cudaFree(copy);
    cudaFree(workspace_);
    cudaStreamDestroy(stream_);
  }

  Tensor tensor(const Buffer& buffer) override {
    Memory* memory = buffer.memory();
    unsigned char*& copy = copies_[memory];
    auto& bytes = memory->bytes();
    if (!copy) {
      check_cuda(cudaMalloc(reinterpret_cast<void**>(&copy), bytes.size()));
      check_cuda(cudaMemcpy(copy, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
    }
    Tensor t = buffer.view();
    t.data = copy + (static_cast<unsigned char*>(t.data) - bytes.data());
    t.device = OCTET_CUDA;
    t.device_index = device_;
    return t;
  }

  void* workspace(size_t bytes) override {
    cudaFree(workspace_);
    bytes_ = bytes;
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&workspace_), bytes + 2 * kGuard));
    check_cuda(cudaMemset(workspace_, kPattern, bytes + 2 * kGuard));
    check_cuda(cudaMemset(workspace_ + kGuard, 0xff, bytes));
    check_cuda(cudaDeviceSynchronize());
    return workspace_ + kGuard;
  }

  void* stream() override { return stream_; }

  bool finish() override {
    check_cuda(cudaStreamSynchronize(stream_));
    for (const auto& [host, copy] : copies_)
      check_cuda(cudaMemcpy(host->bytes().data(), copy, host->bytes().size(), cudaMemcpyDeviceToHost));
    std::vector<unsigned char> all(bytes_ + 2 * kGuard);
    check_cuda(cudaMemcpy(all.data(), workspace_, all.size(), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < kGuard; ++i)
      if (all[i] != kPattern || all[kGuard + bytes_ + i] != kPattern) return true;
    return false;
  }

 private:
  static constexpr size_t kGuard = 256;
  static constexpr unsigned char kPattern = 0x5a;
  int device_;
  cudaStream_t stream_ = nullptr;
  std::map<Memory*, unsigned char*> copies_;
  unsigned char* workspace_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace octet::test
