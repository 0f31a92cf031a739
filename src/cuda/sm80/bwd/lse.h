// Two kernels read the logits of whole rows: one before the backward mainloop, which subtracts the row bias
// (sm80/logits.h) from lse, and one after it, which computes rows again that are not finite.
#pragma once
#include <octet/octet.h>

#include "cuda/bwd/lse.h"
#include "cuda/bwd/preprocess.h"
#include "cuda/fragment/dropout.h"
#include "cuda/fragment/sinks.h"
#include "cuda/fragment/strided.h"
#include "cuda/sm80/logits.h"

namespace octet::cuda::sm80 {

// Sets `to` to lse minus the row bias. Beside a large row bias the saved lse has lost the bits of the logits: such rows
// are computed again.
void subtract_row_biases(const LseParams& p, const LogitTerms& terms, cudaStream_t stream);

// Recomputes the rows of dq, dk and dv that are not finite because of tokens that masks hide.
void recompute_masked(const PreprocessParams& p, const BackwardParams& a, const LogitTerms& terms,
                      const Dropout& dropout, const Strided& dq, cudaStream_t stream);

}  // namespace octet::cuda::sm80
