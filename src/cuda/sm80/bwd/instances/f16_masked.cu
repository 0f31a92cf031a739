// Backward kernels with operands in f16: BackwardKind::masked.
#include "cuda/sm80/bwd/instances/instance.h"

namespace octet::cuda::sm80 {

template BackwardKernel backward_kernel<F16, BackwardKind::masked>(int dim);

}  // namespace octet::cuda::sm80
