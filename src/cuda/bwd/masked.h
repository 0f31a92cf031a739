// The steps of a backward pass with a mask tensor before and after its mainloop.
#pragma once
#include "cuda/bwd/lse.h"
#include "cuda/operands/mask_rows.h"

namespace octet::cuda {

// See bwd/lse.h and preprocess.h.
void subtract_row_biases(const LseParams& p, const MaskRows& rows, float scale, cudaStream_t stream);
void recompute_masked(const PreprocessParams& p, const BackwardParams& a, const MaskRows& rows, const Strided& dq,
                      cudaStream_t stream);

}  // namespace octet::cuda
