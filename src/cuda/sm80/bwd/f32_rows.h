// The f32 backward pass computes these for each row, beside its mainloop.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/fragment/sinks.h"
#include "cuda/fragment/strided.h"

namespace octet::cuda::sm80 {

struct DeltaParams {
  Strided do_, o, residual, dlse;  // residual, dlse: may be absent
  float* delta;                    // [batch, head, token]
};

// delta = do.o - dlse, summed in double: the sum is small where its terms are not.
void compute_delta(const DeltaParams& p, cudaStream_t stream);

// Copies lse to [batch, head, token].
void copy_lse(const Strided& from, float* to, cudaStream_t stream);

// Sums -exp(sink - lse) delta over the queries, and over the batch where it shares its sinks, always in the same order.
void sum_f32_dsinks(const Strided& lse, const float* delta, const Sinks& sinks, const Strided& dsinks,
                    cudaStream_t stream);

}  // namespace octet::cuda::sm80
