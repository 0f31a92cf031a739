// The backward kernels with operands in bf16.
#include "cuda/sm90/bwd/instances/instance.h"

namespace octet::cuda::sm90 {

template Kernel backward_kernel<Bf16, Parts::first>(int64_t, Sums);

}  // namespace octet::cuda::sm90
