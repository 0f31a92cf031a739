// The backend for every NVIDIA GPU of compute capability 8.0 or later, by mma.sync.
#include "core/backend.h"

#include <utility>

#include "core/error.h"
#include "core/names.h"
#include "core/recipe.h"
#include "cuda/host/backend.h"
#include "cuda/operands/key_mask.h"
#include "cuda/sm80/passes.h"

namespace octet::cuda::sm80 {
namespace {

constexpr const char* kWanted = "8.0 or later";

bool fits(int device) { return compute_capability(device) >= 80; }

std::optional<std::string> unavailable() {
  static const std::optional<std::string> reason = no_gpu_reason(fits, kWanted);
  return reason;
}

std::optional<std::string> unsupported_reason(const Problem& p) {
  if (!fits(p.device_index)) return text("device ", p.device_index, " is no GPU of compute capability ", kWanted);
  constexpr PrecisionSet kPrecisions = {OCTET_PRECISION_F32, OCTET_PRECISION_F16, OCTET_PRECISION_BF16};
  if (!kPrecisions.has(p.precision)) return text("it has no ", name(p.precision), "; it has: ", kPrecisions.names());
  if (auto reason = size_unsupported_reason(p)) return reason;
  for (const auto& [t, label] : {std::pair{&p.q, "q"}, {&p.k, "k"}, {&p.v, "v"}})
    if (t->quantization) return text(label, " is quantized; it takes f32, f16, bf16 and e4m3 as they are");
  return missing_exact_output(p);
}

// Returns true where a problem's seen keys are copied side by side, which pays where many queries share them.
bool packs_keys(const Problem& p) {
  constexpr int64_t kFewestQueries = 512, kFewestCopiedQueries = 2048;
  if (!p.mask.present() || p.tokens_q < kFewestQueries || no_key_mask_reason(p)) return false;
  const PackedKeys packed(p, nullptr);
  if (packed.copies_queries() && p.tokens_q < kFewestCopiedQueries) return false;
  return !size_unsupported_reason(packed.problem());
}

Plan plan(const Problem& p) {
  switch (p.pass) {
    case OCTET_FORWARD:
      if (packs_keys(p)) return plan_of<with_packed_keys<forward>, name_with_packed_keys<forward_name>>(p);
      return plan_of<forward, forward_name>(p);
    case OCTET_BACKWARD:
      if (packs_keys(p)) return plan_of<with_packed_keys<backward>, name_with_packed_keys<backward_name>>(p);
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
                       cuda::sm80::unavailable,
                       cuda::sm80::unsupported_reason,
                       nullptr,
                       cuda::sm80::plan};

}  // namespace octet
