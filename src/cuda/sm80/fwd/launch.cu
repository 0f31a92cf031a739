// The forward pass on the host: kernel choice, operands, scheduler, launch.
#include "cuda/sm80/passes.h"

namespace octet::cuda::sm80 {

std::optional<std::string> forward_unsupported_reason(const Problem&) { return "it has no forward pass"; }
std::size_t forward(const Problem&, void*, cudaStream_t) { return 0; }
std::string forward_name(const Problem&) { return {}; }

}  // namespace octet::cuda::sm80
