// The forward kernels of precision int8_fp8.
#include "cuda/sm90/fwd/instances/instance_8bit.h"

namespace octet::cuda::sm90 {

template Kernel forward_8bit_kernel<PrecisionInt8Fp8>(int64_t, int64_t);

}  // namespace octet::cuda::sm90
