// The backward kernels for further parts of the queries, which only exist with operands in f16.
#include "cuda/sm90/bwd/instances/instance.h"

namespace octet::cuda::sm90 {

template Kernel backward_kernel<F16, Parts::further>(int64_t, Sums);

}  // namespace octet::cuda::sm90
