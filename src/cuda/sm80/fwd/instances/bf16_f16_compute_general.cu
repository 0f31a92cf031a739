// The forward kernels of PrecisionBf16F16Compute with general logits.
#include "cuda/sm80/fwd/kernel.h"

namespace octet::cuda::sm80 {

template ForwardKernel forward_kernel_of<PrecisionBf16F16Compute, true, false>(int64_t);

}  // namespace octet::cuda::sm80
