// Jvp kernels with operands in f16, for logits with terms beside scale q.k.
#include "cuda/sm80/jvp/instances/instance.h"

namespace octet::cuda::sm80 {

template JvpKernel jvp_kernel<F16, true>(int64_t dim);

}  // namespace octet::cuda::sm80
