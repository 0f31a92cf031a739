#include "cuda/sm90/instances/backward.h"

namespace octet::cuda::sm90 {

template Kernel backward_kernel<Bf16>(int, Order);

}  // namespace octet::cuda::sm90
