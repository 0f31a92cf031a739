// The backend for compute capability 9.0: H100, H200, GH200.
#include "core/backend.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/names.h"
#include "core/recipe.h"
#include "cuda/host/backend.h"
#include "cuda/host/status.h"
#include "cuda/host/tensor_map.h"
#include "cuda/operands/key_mask.h"
#include "cuda/scheduler/few_queries.h"
#include "cuda/sm90/passes.h"

namespace octet::cuda::sm90 {
namespace {

constexpr const char* kWanted = "9.0";
constexpr int64_t kMaxBackwardTokens = 1 << 21;  // a grid has fewer than 2^16 rows, of 64 tokens each

bool fits(int device) { return compute_capability(device) == 90; }

std::optional<std::string> find_unavailable() {
  if (auto reason = no_gpu_reason(fits, kWanted)) return reason;
  if (const char* reason = tensor_map_unsupported_reason()) return reason;
  return {};
}

std::optional<std::string> unavailable() {
  static const std::optional<std::string> reason = find_unavailable();
  return reason;
}

// The precisions with q and k of 16 bits, which are also those of the backward pass. All others have q and k of 8 bits.
constexpr PrecisionSet kSixteenBits = {OCTET_PRECISION_F16, OCTET_PRECISION_BF16};
bool quantized(const Problem& p) { return !kSixteenBits.has(p.precision); }

// True where P and v have 8 bits, too.
bool is_8bit(const Problem& p) { return forward_8bit_precisions().has(p.precision); }

// Only q, k and v may have 8 bits at a precision of 16.
std::optional<std::string> type_unsupported_reason(const Problem& p) {
  for (const auto& [t, label] : {std::pair{&p.q, "q"}, {&p.k, "k"}, {&p.v, "v"}})
    if (t->quantization || t->dtype == OCTET_E4M3)
      return text(label, " is ", t->quantization ? "quantized" : name(t->dtype), "; its ", name(p.precision),
                  " takes f32, f16 and bf16");
  return {};
}

// Returns the reason for a problem without a mask tensor, of a pass and a precision that there are.
std::optional<std::string> unmasked_unsupported_reason(const Problem& p) {
  if (!p.plain_logits()) return text("it has no ", p.softcap ? "softcap" : "alibi_slopes");
  if (auto reason = size_unsupported_reason(p)) return reason;
  if (quantized(p)) return quantized_unsupported_reason(p);
  if (auto reason = type_unsupported_reason(p)) return reason;
  if (p.pass == OCTET_FORWARD) return {};
  if (const int64_t tokens = std::max(p.tokens_q, p.tokens_k); tokens > kMaxBackwardTokens)
    return text("its backward pass takes up to ", kMaxBackwardTokens, " tokens, found ", tokens);
  if (p.bias_correction == OCTET_BIAS_CORRECTION_GPROJ)
    return "its backward pass has no bias_correction gproj; it has: f16, none, beta, exact_delta";
  return missing_exact_output(p);
}

std::optional<std::string> unsupported_reason(const Problem& p) {
  if (!fits(p.device_index)) return text("device ", p.device_index, " is no GPU of compute capability ", kWanted);
  if (p.pass == OCTET_JVP) return text("it has no ", name(p.pass), " pass; it has: forward, backward");
  const PrecisionSet all = forward_precisions() | forward_8bit_precisions();
  if (!all.has(p.precision)) return text("it has no ", name(p.precision), "; it has: ", all.names());
  if (quantized(p) && p.pass == OCTET_BACKWARD)
    return text("it has no ", name(p.precision), " ", name(p.pass), " pass; it has: forward");
  if (!p.mask.present()) return unmasked_unsupported_reason(p);
  if (auto reason = no_key_mask_reason(p)) return reason;
  return unmasked_unsupported_reason(PackedKeys(p, nullptr).problem());
}

std::optional<std::string> deferral_reason(const Problem& p) {
  if (p.pass != OCTET_FORWARD || quantized(p)) return {};
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount, p.device_index);
  if (!splitting_keys_is_faster(p, multiprocessors)) return {};
  return text("sm80 is faster for ", most_queries(p), " queries over ", most_keys(p), " keys, which it splits");
}

template <auto pass, auto name_of>
Plan plan_with_mask(const Problem& p) {
  if (!p.mask.present()) return plan_of<pass, name_of>(p);
  return plan_of<with_packed_keys<pass>, name_with_packed_keys<name_of>>(p);
}

Plan plan(const Problem& p) {
  if (p.pass == OCTET_BACKWARD) return plan_with_mask<backward, backward_name>(p);
  return is_8bit(p) ? plan_with_mask<forward_8bit, forward_8bit_name>(p) : plan_with_mask<forward, forward_name>(p);
}

}  // namespace
}  // namespace octet::cuda::sm90

namespace octet {

extern const Backend kSm90;
const Backend kSm90 = {"sm90",
                       "tensor cores and TMA of Hopper GPUs (H100, H200)",
                       OCTET_CUDA,
                       cuda::sm90::unavailable,
                       cuda::sm90::unsupported_reason,
                       cuda::sm90::deferral_reason,
                       cuda::sm90::plan};

}  // namespace octet
