#include "cuda/host/backend.h"

#include <algorithm>
#include <limits>

#include "core/error.h"

namespace octet::cuda {

int compute_capability(int device) {
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess)
    return 10 * major + minor;
  cudaGetLastError();  // else the caller's next call would report it
  return 0;
}

std::optional<std::string> no_gpu_reason(bool (*fits)(int device), const char* wanted) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();  // else the caller's next call would report it
    int driver = 0;
    if (cudaDriverGetVersion(&driver) == cudaSuccess && !driver) return "no NVIDIA driver";
    return text("no usable GPU: ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ')');
  }
  for (int device = 0; device < count; ++device)
    if (fits(device)) return {};
  return text("none of the ", count, " GPUs has compute capability ", wanted);
}

std::optional<std::string> size_unsupported_reason(const Problem& p) {
  constexpr int64_t kMaxTokens = 1 << 28, kMaxBlocks = std::numeric_limits<int32_t>::max();
  const int64_t tokens = std::max(p.tokens_q, p.tokens_k);
  if (tokens > kMaxTokens) return text(tokens, " tokens; it takes up to ", kMaxTokens);
  if (p.batch * p.heads > kMaxBlocks / (p.tokens_q / 64 + 1))
    return text(p.batch * p.heads, " heads of ", p.tokens_q, " queries are more blocks than it can count");
  return {};
}

}  // namespace octet::cuda
