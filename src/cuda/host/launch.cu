#include <atomic>

#include "cuda/host/launch.h"

namespace octet::cuda {
namespace {

// Its code stands for that of all general kernels, which are compiled for the same architectures.
__global__ void probe_kernel() {}

}  // namespace

bool general_kernels_wait() {
  constexpr int kDevices = 64, kUnknown = 0, kWaits = 1, kCannot = 2;
  static std::atomic<int> known[kDevices];
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const bool cached = device < kDevices;
  if (const int state = cached ? known[device].load(std::memory_order_relaxed) : kUnknown) return state == kWaits;
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, probe_kernel), "cudaFuncGetAttributes");
  const bool waits = attributes.ptxVersion >= 90;
  if (cached) known[device].store(waits ? kWaits : kCannot, std::memory_order_relaxed);
  return waits;
}

}  // namespace octet::cuda
