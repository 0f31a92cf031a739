// Backward kernels with operands in f16, for logits with terms beside scale q.k.
#include "cuda/sm80/bwd/instances/instance.h"

namespace octet::cuda::sm80 {

template BackwardKernel backward_kernel<F16, true>(int dim);

}  // namespace octet::cuda::sm80
