// The backend for every NVIDIA GPU of compute capability 8.0 or later, by mma.sync.
#include "core/backend.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "core/error.h"
#include "core/names.h"
#include "core/recipe.h"
#include "cuda/bwd/choose.h"
#include "cuda/host/backend.h"
#include "cuda/operands/cache.h"
#include "cuda/operands/decoded.h"
#include "cuda/operands/key_mask.h"
#include "cuda/operands/listed_keys.h"
#include "cuda/operands/rewritten.h"
#include "cuda/sm80/passes.h"

namespace octet::cuda::sm80 {
namespace {

constexpr const char* kWanted = "8.0 or later";

bool fits(int device) { return compute_capability(device) >= 80; }

std::optional<std::string> unavailable() {
  static const std::optional<std::string> reason = no_gpu_reason(fits, kWanted);
  return reason;
}

// Returns the packed sequences of a problem whose seen keys are copied side by side, which pays where many queries
// share them; else null.
std::shared_ptr<const PackedKeys> packed_keys(const Problem& p, void* workspace) {
  constexpr int64_t kFewestQueries = 512, kFewestCopiedQueries = 2048;
  if (!p.mask.present() || p.dropout || p.tokens_q < kFewestQueries || no_key_mask_reason(p)) return nullptr;
  auto keys = std::make_shared<const PackedKeys>(p, workspace);
  if (keys->copies_queries() && p.tokens_q < kFewestCopiedQueries) return nullptr;
  return size_unsupported_reason(keys->problem()) ? nullptr : keys;
}

// Returns a problem whose seen keys are listed, where kernels of few queries read them by such a list; else null.
std::shared_ptr<const ListedKeys> listed_keys(const Problem& p, const ForwardNumerics& numerics, void* workspace) {
  if (p.pass != OCTET_FORWARD || !can_list_keys(p)) return nullptr;
  auto keys = std::make_shared<const ListedKeys>(p, workspace);
  if (no_cache_reason(keys->problem())) return nullptr;
  return reads_pages(CachedKeys(keys->problem(), true, nullptr).problem(), numerics) ? keys : nullptr;
}

// Returns the reason why there is no pass of a precision whose q and k have 8 bits.
std::optional<std::string> int8_unsupported_reason(const Problem& p, const ForwardNumerics& numerics) {
  const bool backward = p.pass == OCTET_BACKWARD, blocks = numerics.formats == kSagebwd,
             trains = numerics.formats == kInt8 || blocks;
  if (p.pass == OCTET_JVP || (backward && !trains))
    return text("it has no ", name(p.precision), " ", name(p.pass), " pass; it has: forward",
                trains ? ", backward" : "");
  if (!backward && numerics.formats != kInt8Training) return {};
  constexpr int64_t kMostDim = 128;
  if (const int64_t dim = std::max(p.dim, p.dim_v); dim > kMostDim)
    return text("it has no ", name(p.precision), backward ? " backward pass" : " forward pass with o_residual",
                " for head dim ", dim, "; it has: up to ", kMostDim);
  if (!blocks && !p.o_residual.present())
    return text(
        "its int8 backward pass needs o_residual, which is NULL; a forward pass that is asked for it writes it, "
        "with the o and lse of this backward pass");
  return {};
}

// Returns the reason why there is no pass of a precision for head dims that are too large.
std::optional<std::string> dim_unsupported_reason(const Problem& p, const ForwardFormats& formats) {
  constexpr int64_t kMostJvpDim = 256, kMostDmaskDim = 256;
  const int64_t dim = std::max(p.dim, p.dim_v), most = p.pass == OCTET_JVP ? kMostJvpDim : most_head_dim(formats);
  if (dim > most)
    return text("it has no ", name(p.precision), " ", name(p.pass), p.pass == OCTET_JVP ? "" : " pass",
                " for head dim ", dim, "; it has: up to ", most);
  if (p.dmask.present() && dim > kMostDmaskDim)
    return text("it has no gradient of masks for head dim ", dim, "; it has: up to ", kMostDmaskDim);
  return {};
}

// Returns the operands that become numbers: of those that came quantized all that the kernels do not take as they came,
// which they also do with a v of e4m3 at fp8 that has a scale for each head.
Prequantized decoded_operands(const Problem& p, const ForwardNumerics& numerics) {
  const Prequantized taken = p.pass == OCTET_FORWARD ? numerics.came : Prequantized{};
  const auto decodes = [&](const View& t, bool as_it_came) {
    if (t.pages.size) return false;  // kernels of few queries read its codes
    const octet_quantization* how = t.quantization;
    const bool per_head = how && how->granularity == OCTET_PER_TENSOR && !how->mean && !how->hadamard_seed;
    return how && !as_it_came && !(numerics.formats == kFp8 && t.dtype == OCTET_E4M3 && per_head);
  };
  return {decodes(p.q, taken.q), decodes(p.k, taken.k), decodes(p.v, taken.v)};
}

// Returns the reason why q, k or v cannot come quantized as it is.
std::optional<std::string> quantized_unsupported_reason(const Problem& p, const ForwardFormats& formats) {
  const bool trains = formats == kInt8Training || (p.pass == OCTET_BACKWARD && formats.qk == OCTET_I8);
  for (const auto& [t, label] : {std::pair{&p.q, "q"}, {&p.k, "k"}, {&p.v, "v"}}) {
    if (!t->quantization) continue;
    if (p.pass == OCTET_JVP)
      return text(label, " is quantized ", name(t->dtype), "; its jvp takes f32, f16, bf16 and e4m3 as they are");
    if (trains && (t->dtype == OCTET_I8 || t->dtype == OCTET_U8))
      return text(label, " is quantized ", name(t->dtype), "; its ", name(p.precision), " ",
                  p.pass == OCTET_BACKWARD ? "backward pass" : "forward pass with o_residual",
                  " takes f32, f16, bf16 and e4m3; octet_dequantize gives these");
  }
  return {};
}

Answer plan(const Problem& p, void* workspace) {
  if (!fits(p.device_index)) return text("device ", p.device_index, " is no GPU of compute capability ", kWanted);
  const ForwardNumerics numerics = forward_numerics(p);
  if (!has_kernels(numerics.formats))
    return text("it has no ", name(p.precision), "; it has: ", precisions_whose(p, has_kernels).names());
  if (numerics.formats.has_8bit_qk())
    if (auto reason = int8_unsupported_reason(p, numerics)) return std::move(*reason);
  if (auto reason = dim_unsupported_reason(p, numerics.formats)) return std::move(*reason);
  if (p.dropout && !has_dropout(numerics.formats)) {
    const auto has = [](const ForwardFormats& x) { return has_kernels(x) && has_dropout(x); };
    return text("it has no dropout in ", name(p.precision), "; it has: ", precisions_whose(p, has).names());
  }
  if (p.dmask.present() && numerics.formats.has_8bit_qk()) {
    const auto has = [](const ForwardFormats& x) { return has_kernels(x) && !x.has_8bit_qk(); };
    return text("it has no gradient of masks in ", name(p.precision), "; it has: ", precisions_whose(p, has).names());
  }
  if (auto reason = size_unsupported_reason(p)) return std::move(*reason);
  if (auto reason = quantized_unsupported_reason(p, numerics.formats)) return std::move(*reason);
  if (p.smooth_q && numerics.formats == kInt8Training)
    return text(
        "smooth_q is on; its int8 forward pass with o_residual takes auto and off, as the backward pass that reads "
        "its o and lse smooths no q");
  if (auto reason = bias_correction_unsupported_reason(p)) return std::move(*reason);
  if (auto reason = missing_exact_output(p)) return std::move(*reason);
  const auto plan_of_pass = [&](const Problem& problem, void* memory) -> Answer {
    return problem.pass == OCTET_FORWARD    ? forward(problem, numerics, memory)
           : problem.pass == OCTET_BACKWARD ? backward(problem, memory)
                                            : jvp(problem, memory);
  };
  const auto in_pages = [&](const Problem& problem) { return reads_pages(problem, numerics); };
  const auto plan_of_numbers = [&](const Problem& problem, void* memory) -> Answer {
    if (auto keys = listed_keys(problem, numerics, memory))
      return plan_of_rewritten(std::move(keys), memory, [&](const Problem& cached, void* rest) {
        return plan_of_cached(cached, rest, in_pages, plan_of_pass);
      });
    if (auto keys = packed_keys(problem, memory)) return plan_of_rewritten(std::move(keys), memory, plan_of_pass);
    return plan_of_pass(problem, memory);
  };
  const auto plan_of_codes = [&](const Problem& problem, void* memory) -> Answer {
    const Prequantized decodes = decoded_operands(problem, numerics);
    for (const auto& [t, decoded] :
         {std::pair{&problem.q, decodes.q}, {&problem.k, decodes.k}, {&problem.v, decodes.v}})
      if (const int64_t rows = t->shape[0] * t->shape[1] * t->shape[2];
          decoded && rows > std::numeric_limits<int32_t>::max())
        return text("an operand that came quantized has ", rows, " rows; it decodes up to 2147483647");
    if (!decodes.q && !decodes.k && !decodes.v) return plan_of_numbers(problem, memory);
    return plan_of_rewritten(std::make_shared<const DecodedOperands>(problem, decodes, memory), memory,
                             plan_of_numbers);
  };
  return p.cached() ? plan_of_cached(p, workspace, in_pages, plan_of_codes) : plan_of_codes(p, workspace);
}

}  // namespace
}  // namespace octet::cuda::sm80

namespace octet {

extern const Backend kSm80;
const Backend kSm80 = {cuda::sm80::kName, "mma.sync, on every NVIDIA GPU since Ampere",
                       OCTET_CUDA,        cuda::sm80::unavailable,
                       cuda::sm80::plan,  nullptr};

}  // namespace octet
