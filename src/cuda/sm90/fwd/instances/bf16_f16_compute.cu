// The forward kernels of precision bf16 with P and V in f16.
#include "cuda/sm90/fwd/instances/instance_16bit.h"

namespace octet::cuda::sm90 {

template Kernel forward_kernel<PrecisionBf16F16Compute>(int64_t, int64_t);

}  // namespace octet::cuda::sm90
