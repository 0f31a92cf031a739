// Errors of CUDA as exceptions of octet, and the devices of CUDA.
#pragma once
#include <cuda_runtime_api.h>

#include "core/error.h"

namespace octet::cuda {

// Throws Failure unless a call of the runtime succeeded.
inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // else the next call would report it
  throw Failure(OCTET_FAILURE, text(call, ": ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ')'));
}

inline int device_attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

// Makes a device current, and restores the former one at the end of the scope. A thread that has not used CUDA yet has
// no context, which functions of the driver need: setting the device makes its primary context current.
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
