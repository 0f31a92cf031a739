// The forward kernels of PrecisionBf16F16Compute for mask tensors.
#include "cuda/sm80/fwd/kernel.h"

namespace octet::cuda::sm80 {

template ForwardKernel masked_forward_kernel_of<PrecisionBf16F16Compute>(int64_t);

}  // namespace octet::cuda::sm80
