// The steps of a backward pass with ALiBi before and after its mainloop.
#pragma once
#include "cuda/bwd/lse.h"
#include "cuda/fragment/alibi.h"

namespace octet::cuda {

// See bwd/lse.h and preprocess.h.
void subtract_row_biases(const LseParams& p, const AlibiSlopes& slopes, float scale, cudaStream_t stream);
void recompute_masked(const PreprocessParams& p, const BackwardParams& a, const AlibiSlopes& slopes, const Strided& dq,
                      cudaStream_t stream);

}  // namespace octet::cuda
