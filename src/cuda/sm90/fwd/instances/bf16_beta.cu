// The forward kernels of precision bf16 with bias correction beta.
#include "cuda/sm90/fwd/instances/instance_16bit.h"

namespace octet::cuda::sm90 {

template Kernel forward_kernel<WithBeta<PrecisionBf16>>(int64_t, int64_t);

}  // namespace octet::cuda::sm90
