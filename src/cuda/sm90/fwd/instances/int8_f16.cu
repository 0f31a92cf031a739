// The forward kernels of precision int8_f16.
#include "cuda/sm90/fwd/instances/instance_16bit.h"

namespace octet::cuda::sm90 {

template Kernel forward_kernel<PrecisionInt8F16>(DimsIndex);

}  // namespace octet::cuda::sm90
