// CUDA's answers, turned into octet's.
#pragma once
#include <cuda_runtime_api.h>

#include "core/error.h"

namespace octet::cuda {

// Throws unless a call of the runtime succeeded.
inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // not to be found by the next call
  throw Failure(OCTET_FAILURE, text(call, ": ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ')'));
}

// Makes a device current, and the former one again at the end. A thread that has not used CUDA yet has no context,
// which the driver's own functions need: setting the device makes its primary one current.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    check(cudaGetDevice(&former_), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceScope() { cudaSetDevice(former_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int former_ = 0;
};

}  // namespace octet::cuda
