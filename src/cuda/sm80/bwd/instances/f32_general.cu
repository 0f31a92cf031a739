// The f32 backward kernels with general logits.
#include "cuda/sm80/bwd/instances/f32.h"

namespace octet::cuda::sm80 {

template void launch_f32<true>(int, const F32Params&, int64_t, int64_t, cudaStream_t);

}  // namespace octet::cuda::sm80
