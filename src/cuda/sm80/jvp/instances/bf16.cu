// Jvp kernels with operands in bf16.
#include "cuda/sm80/jvp/instances/instance.h"

namespace octet::cuda::sm80 {

template JvpKernel jvp_kernel<Bf16, false>(int64_t dim);

}  // namespace octet::cuda::sm80
