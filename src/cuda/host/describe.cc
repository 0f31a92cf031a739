// Describes the driver and the GPUs for octet_info.
#include <cuda_runtime_api.h>

#include "core/error.h"
#include "core/info.h"

namespace octet {

std::string driver_json() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess || !version) return "null";
  return json_string(text("CUDA ", version / 1000, '.', version % 1000 / 10));
}

std::string gpus_json() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // else the caller's next call would report it
    return "[]";
  }
  std::string out;
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) continue;
    out += text(out.empty() ? "" : ", ", "{\"name\": ", json_string(properties.name), ", \"compute_capability\": \"",
                properties.major, '.', properties.minor, "\", \"multiprocessors\": ", properties.multiProcessorCount,
                ", \"memory_bytes\": ", properties.totalGlobalMem, '}');
  }
  return '[' + out + ']';
}

}  // namespace octet
