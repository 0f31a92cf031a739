// The backend for compute capability 9.0: H100, H200, GH200.
#include "core/backend.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "core/error.h"
#include "core/names.h"
#include "cuda/fwd/few_queries.h"
#include "cuda/host/backend.h"
#include "cuda/host/card.h"
#include "cuda/host/tensor_map.h"
#include "cuda/operands/cache.h"
#include "cuda/operands/key_mask.h"
#include "cuda/operands/listed_keys.h"
#include "cuda/operands/rewritten.h"
#include "cuda/sm90/head_dims.h"
#include "cuda/sm90/passes.h"

namespace octet::cuda::sm90 {
namespace {

constexpr const char* kWanted = "9.0";

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

// Only q, k and v may have 8 bits at a precision of 16.
std::optional<std::string> type_unsupported_reason(const Problem& p) {
  for (const auto& [t, label] : {std::pair{&p.q, "q"}, {&p.k, "k"}, {&p.v, "v"}})
    if (t->quantization || t->dtype == OCTET_E4M3)
      return text(label, " is ", t->quantization ? "quantized" : name(t->dtype), "; its ", name(p.precision),
                  " takes f32, f16 and bf16");
  return {};
}

// Returns the answer to a problem without a key mask, of a pass and a precision that there are.
Answer plan_as_it_is(const Problem& p, const ForwardNumerics& numerics, void* workspace) {
  if (p.softcap) return std::string("it has no softcap");
  if (p.pass == OCTET_JVP)
    if (auto reason = jvp_unsupported_reason(p)) return std::move(*reason);
  if (auto reason = extra_unsupported_reason(p, numerics)) return std::move(*reason);
  if (auto reason = size_unsupported_reason(p)) return std::move(*reason);
  if (const int64_t dim = std::max(p.dim, p.dim_v); dim > kMostDim)
    return text("it has no kernels for head dim ", dim, "; it has: up to ", kMostDim);
  const ForwardFormats& formats = numerics.formats;
  if (auto reason = formats.has_8bit_qk() ? quantized_unsupported_reason(p, formats) : type_unsupported_reason(p))
    return std::move(*reason);
  if (p.pass == OCTET_FORWARD) return forward(p, numerics, workspace);
  if (p.pass == OCTET_JVP) return jvp(p, workspace);
  if (auto reason = backward_unsupported_reason(p)) return std::move(*reason);
  return backward(p, workspace);
}

Answer plan(const Problem& p, void* workspace) {
  if (!fits(p.device_index)) return text("device ", p.device_index, " is no GPU of compute capability ", kWanted);
  const ForwardNumerics numerics = forward_numerics(p);
  if (!has_kernels(numerics.formats))
    return text("it has no ", name(p.precision), "; it has: ", precisions_whose(p, has_kernels).names());
  if (numerics.formats.has_8bit_qk() && p.pass != OCTET_FORWARD)
    return text("it has no ", name(p.precision), " ", name(p.pass), " pass; it has: forward");
  if (p.dmask.present()) return text("it has no gradient of masks");
  const auto plan_of_packed = [&](const Problem& packed, void* rest) { return plan_as_it_is(packed, numerics, rest); };
  const auto in_pages = [](const Problem&) { return false; };
  if (p.cached()) return plan_of_cached(p, workspace, in_pages, plan_of_packed);
  if (!p.mask.present()) return plan_as_it_is(p, numerics, workspace);
  if (auto reason = no_key_mask_reason(p)) {
    if (p.pass == OCTET_JVP) return std::move(*reason);
    return plan_as_it_is(p, numerics, workspace);
  }
  return plan_of_rewritten(std::make_shared<const PackedKeys>(p, workspace), workspace, plan_of_packed);
}

// Returns why `sm80` is faster under a bool mask tensor that is no key mask, or nothing. It leaves out the tiles that
// the mask hides, which is half of them under a causal one.
std::optional<std::string> hidden_tiles_reason(const Problem& p) {
  constexpr int64_t kMostKeys = 1024;
  if (p.mask.dtype != OCTET_BOOL || !no_key_mask_reason(p) || most_keys(p) <= kMostKeys) return {};
  return text("sm80 leaves out tiles that a bool mask tensor hides, and is faster over more than ", kMostKeys, " keys");
}

// Returns whether keys are copied side by side that the kernels of few queries of sm80 read as they lie: in a KV cache,
// or behind a key mask.
bool copies_keys(const Problem& p) { return p.cached() ? !lies_in_place(p) : can_list_keys(p); }

std::optional<std::string> deferral_reason(const Problem& p) {
  if (p.mask.present())
    if (auto reason = hidden_tiles_reason(p)) return reason;
  if (p.pass != OCTET_FORWARD || !splitting_keys_is_faster(p, card(p.device_index).multiprocessors, copies_keys(p)))
    return {};
  return text("sm80 is faster for ", most_queries(p), " queries over ", most_keys(p), " keys, which it splits");
}

}  // namespace
}  // namespace octet::cuda::sm90

namespace octet {

extern const Backend kSm90;
const Backend kSm90 = {cuda::sm90::kName, "tensor cores and TMA of Hopper GPUs (H100, H200)",
                       OCTET_CUDA,        cuda::sm90::unavailable,
                       cuda::sm90::plan,  cuda::sm90::deferral_reason};

}  // namespace octet
