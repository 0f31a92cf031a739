// The backend for compute capability 9.0: H100, H200, GH200.
#include "core/backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/names.h"
#include "core/recipe.h"
#include "cuda/host/tensor_map.h"
#include "cuda/sm90/passes.h"

namespace octet::cuda::sm90 {
namespace {

constexpr int kMajor = 9, kMinor = 0;
constexpr int64_t kMaxBackwardTokens = 1 << 21;  // a grid has fewer than 2^16 rows, of 64 tokens each
constexpr int64_t kMaxTokens = 1 << 28, kMaxBlocks = std::numeric_limits<int32_t>::max();

bool fits(int device) {
  int major = 0, minor = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == kMajor &&
         minor == kMinor;
}

std::optional<std::string> find_unsupported_reason() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();  // else the caller's next call would report it
    return text("no usable GPU: ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ')');
  }
  bool any = false;
  for (int device = 0; device < count; ++device) any |= fits(device);
  if (!any) return text("none of the ", count, " GPUs has compute capability 9.0");
  if (const char* reason = tensor_map_unsupported_reason()) return reason;
  return {};
}

std::optional<std::string> unavailable() {
  static const std::optional<std::string> reason = find_unsupported_reason();
  return reason;
}

// The precisions with q and k of 16 bits, which are also those of the backward pass. All others have q and k of 8 bits.
constexpr PrecisionSet kSixteenBits = {OCTET_PRECISION_F16, OCTET_PRECISION_BF16};
bool quantized(const Problem& p) { return !kSixteenBits.has(p.precision); }

// True where P and v have 8 bits, too.
bool is_8bit(const Problem& p) { return forward_8bit_precisions().has(p.precision); }

std::optional<std::string> unsupported_reason_of(const View& t, const char* label) {
  if (!t.present()) return {};
  if (t.quantization) return text(label, " is quantized; this backend takes f32, f16 and bf16");
  if (t.dtype != OCTET_F32 && t.dtype != OCTET_F16 && t.dtype != OCTET_BF16)
    return text(label, " is ", name(t.dtype), "; this backend takes f32, f16 and bf16");
  return {};
}

std::optional<std::string> backward_unsupported_reason(const Problem& p) {
  if (p.bias_correction == OCTET_BIAS_CORRECTION_GPROJ)
    return "its backward pass has no bias_correction gproj; it has: f16, none, beta, exact_delta";
  if (std::max(p.tokens_q, p.tokens_k) > kMaxBackwardTokens)
    return text("its backward pass takes up to ", kMaxBackwardTokens, " tokens, found ",
                std::max(p.tokens_q, p.tokens_k));
  return missing_exact_output(p);
}

std::optional<std::string> unsupported_reason(const Problem& p) {
  if (!fits(p.device_index)) return text("device ", p.device_index, " is no GPU of compute capability 9.0");
  if (p.pass == OCTET_JVP) return text("it has no ", name(p.pass), " pass; it has: forward, backward");
  const PrecisionSet all = forward_precisions() | forward_8bit_precisions();
  if (!all.has(p.precision)) return text("it has no ", name(p.precision), "; it has: ", all.names());
  if (quantized(p) && p.pass == OCTET_BACKWARD)
    return text("it has no ", name(p.precision), " ", name(p.pass), " pass; it has: forward");
  if (p.mask.present()) return "it takes no mask tensor; it has causal and window masks";
  if (!p.plain_logits())
    return text("it has no ", p.softcap ? "softcap" : "alibi_slopes", "; on CPU tensors octet has");
  if (std::max(p.tokens_q, p.tokens_k) > kMaxTokens)
    return text(std::max(p.tokens_q, p.tokens_k), " tokens; it takes up to ", kMaxTokens);
  if (p.batch * p.heads > kMaxBlocks / (p.tokens_q / 64 + 1))
    return text(p.batch * p.heads, " heads of ", p.tokens_q, " queries are more blocks than it can count");
  if (quantized(p)) return quantized_unsupported_reason(p);
  for (const auto& [t, label] : {std::pair{&p.q, "q"}, {&p.k, "k"}, {&p.v, "v"}, {&p.o, "o"}, {&p.do_, "do"}})
    if (auto found = unsupported_reason_of(*t, label)) return found;
  return p.pass == OCTET_BACKWARD ? backward_unsupported_reason(p) : std::nullopt;
}

template <auto pass, auto name_of>
Plan plan_of(const Problem& p) {
  const auto run = [](const Problem& problem, Bytes workspace, void* stream) {
    pass(problem, workspace.data, static_cast<cudaStream_t>(stream));
  };
  return {pass(p, nullptr, nullptr), name_of, run};
}

Plan plan(const Problem& p) {
  if (p.pass == OCTET_BACKWARD) return plan_of<backward, backward_name>(p);
  return is_8bit(p) ? plan_of<forward_8bit, forward_8bit_name>(p) : plan_of<forward, forward_name>(p);
}

}  // namespace
}  // namespace octet::cuda::sm90

namespace octet {

extern const Backend kSm90;
const Backend kSm90 = {"sm90",
                       "tensor cores and TMA of Hopper GPUs (H100, H200)",
                       OCTET_CUDA,
                       true,
                       cuda::sm90::unavailable,
                       cuda::sm90::unsupported_reason,
                       cuda::sm90::plan};

}  // namespace octet
