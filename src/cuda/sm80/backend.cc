// The backend for every NVIDIA GPU of compute capability 8.0 or later, by mma.sync.
#include "core/backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/names.h"
#include "core/recipe.h"
#include "cuda/sm80/passes.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kLeastMajor = 8;
constexpr int64_t kMaxTokens = 1 << 28, kMaxBlocks = std::numeric_limits<int32_t>::max();

// Returns the major number of a device's compute capability, or 0 where there is no such device.
int major_of(int device) {
  int major = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess) return major;
  cudaGetLastError();  // else the caller's next call would report it
  return 0;
}

std::optional<std::string> find_unsupported_reason() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    return text("no usable GPU: ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ')');
  }
  for (int device = 0; device < count; ++device)
    if (major_of(device) >= kLeastMajor) return {};
  return text("none of the ", count, " GPUs has compute capability 8.0 or later");
}

std::optional<std::string> unavailable() {
  static const std::optional<std::string> reason = find_unsupported_reason();
  return reason;
}

std::optional<std::string> unsupported_reason_of(const View& t, const char* label) {
  if (!t.present()) return {};
  if (t.quantization) return text(label, " is quantized; this backend takes f32, f16 and bf16");
  if (t.dtype != OCTET_F32 && t.dtype != OCTET_F16 && t.dtype != OCTET_BF16)
    return text(label, " is ", name(t.dtype), "; this backend takes f32, f16 and bf16");
  return {};
}

std::optional<std::string> unsupported_reason(const Problem& p) {
  if (major_of(p.device_index) < kLeastMajor)
    return text("device ", p.device_index, " is no GPU of compute capability 8.0 or later");
  constexpr PrecisionSet kPrecisions = {OCTET_PRECISION_F32, OCTET_PRECISION_F16, OCTET_PRECISION_BF16};
  if (!kPrecisions.has(p.precision)) return text("it has no ", name(p.precision), "; it has: ", kPrecisions.names());
  if (std::max(p.tokens_q, p.tokens_k) > kMaxTokens)
    return text(std::max(p.tokens_q, p.tokens_k), " tokens; it takes up to ", kMaxTokens);
  if (p.batch * p.heads > kMaxBlocks / (p.tokens_q / 64 + 1))
    return text(p.batch * p.heads, " heads of ", p.tokens_q, " queries are more blocks than it can count");
  for (const auto& [t, label] : {std::pair{&p.q, "q"},
                                 {&p.k, "k"},
                                 {&p.v, "v"},
                                 {&p.o, "o"},
                                 {&p.do_, "do"},
                                 {&p.tq, "tq"},
                                 {&p.tk, "tk"},
                                 {&p.tv, "tv"}})
    if (auto found = unsupported_reason_of(*t, label)) return found;
  switch (p.pass) {
    case OCTET_FORWARD:
      return forward_unsupported_reason(p);
    case OCTET_BACKWARD:
      return backward_unsupported_reason(p);
    default:
      return {};
  }
}

template <auto pass, auto name_of>
Plan plan_of(const Problem& p) {
  const auto run = [](const Problem& problem, Bytes workspace, void* stream) {
    pass(problem, workspace.data, static_cast<cudaStream_t>(stream));
  };
  return {pass(p, nullptr, nullptr), name_of, run};
}

Plan plan(const Problem& p) {
  switch (p.pass) {
    case OCTET_FORWARD:
      return plan_of<forward, forward_name>(p);
    case OCTET_BACKWARD:
      return plan_of<backward, backward_name>(p);
    default:
      return plan_of<jvp, jvp_name>(p);
  }
}

}  // namespace
}  // namespace octet::cuda::sm80

namespace octet {

extern const Backend kSm80;
const Backend kSm80 = {"sm80",
                       "mma.sync, on every NVIDIA GPU since Ampere",
                       OCTET_CUDA,
                       false,
                       cuda::sm80::unavailable,
                       cuda::sm80::unsupported_reason,
                       cuda::sm80::plan};

}  // namespace octet
