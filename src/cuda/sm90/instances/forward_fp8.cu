#include "cuda/sm90/instances/byte_forward.h"

namespace octet::cuda::sm90 {

template Kernel byte_forward_kernel<PrecisionFp8>(DimsIndex);

}  // namespace octet::cuda::sm90
