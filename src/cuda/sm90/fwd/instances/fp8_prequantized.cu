// The forward kernels of precision fp8 with prequantized q and k.
#include "cuda/sm90/fwd/instances/instance_8bit.h"

namespace octet::cuda::sm90 {

template Kernel forward_8bit_kernel<PrecisionFp8Prequantized>(int64_t, int64_t);

}  // namespace octet::cuda::sm90
