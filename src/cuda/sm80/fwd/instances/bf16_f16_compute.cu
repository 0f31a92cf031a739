// The forward kernels of PrecisionBf16F16Compute.
#include "cuda/sm80/fwd/kernel.h"

namespace octet::cuda::sm80 {

template ForwardKernel forward_kernel_of<PrecisionBf16F16Compute, false, false>(int64_t);

}  // namespace octet::cuda::sm80
