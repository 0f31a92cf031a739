// The forward kernels of PrecisionF16.
#include "cuda/sm80/fwd/kernel.h"

namespace octet::cuda::sm80 {

template ForwardKernel forward_kernel_of<PrecisionF16, false, false>(int64_t);

}  // namespace octet::cuda::sm80
