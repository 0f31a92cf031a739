// The forward kernels of precision fp8.
#include "cuda/sm90/fwd/instances/instance_8bit.h"

namespace octet::cuda::sm90 {

template Kernel forward_8bit_kernel<PrecisionFp8>(DimsIndex);

}  // namespace octet::cuda::sm90
