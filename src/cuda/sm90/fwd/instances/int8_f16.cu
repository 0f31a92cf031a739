// The forward kernels with q and k of int8, P and V in f16.
#include "cuda/sm90/fwd/instances/instance_16bit.h"

namespace octet::cuda::sm90 {

template Kernel forward_kernel<PrecisionInt8F16>(int64_t, int64_t);

}  // namespace octet::cuda::sm90
