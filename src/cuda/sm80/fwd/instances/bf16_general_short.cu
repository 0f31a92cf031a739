// The forward kernels of PrecisionBf16 with general logits for few queries.
#include "cuda/sm80/fwd/kernel.h"

namespace octet::cuda::sm80 {

template ForwardKernel forward_kernel_of<PrecisionBf16, true, true>(int64_t);

}  // namespace octet::cuda::sm80
