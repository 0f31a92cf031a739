// The backend for every NVIDIA GPU of compute capability 8.0 or later, by mma.sync.
#include "core/backend.h"

#include <utility>

#include "core/error.h"
#include "core/names.h"
#include "core/recipe.h"
#include "cuda/host/backend.h"
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
                       cuda::sm80::unavailable,
                       cuda::sm80::unsupported_reason,
                       nullptr,
                       cuda::sm80::plan};

}  // namespace octet
