// The forward kernels of PrecisionBf16 for mask tensors.
#include "cuda/sm80/fwd/kernel.h"

namespace octet::cuda::sm80 {

template ForwardKernel masked_forward_kernel_of<PrecisionBf16>(int64_t);

}  // namespace octet::cuda::sm80
