// The forward kernels of PrecisionF16 for mask tensors.
#include "cuda/sm80/fwd/kernel.h"

namespace octet::cuda::sm80 {

template ForwardKernel masked_forward_kernel_of<PrecisionF16>(int64_t);

}  // namespace octet::cuda::sm80
