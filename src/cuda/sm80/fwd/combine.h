// Combines what the splits of the keys gave each row: with P of split i over its own origin r_i and o_i divided by l_i,
//   w_i = l_i 2^(r_i - max r);  o = sum of w_i o_i / sum of w_i;  lse = ln (sum of w_i 2^max r)
// Sums have a fixed order. Sinks count once, here.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/sm80/fwd/params.h"

namespace octet::cuda::sm80 {

struct CombineParams {
  const float* split_o;             // [batch, split, head, token, dim_v]
  const RowStatistics* statistics;  // [batch, split, head, token]
  int splits;
  int64_t batch, heads, tokens;
  int dim_v;
  Output o, o_residual, lse;
  Sinks sinks;
};
void combine(const CombineParams& a, cudaStream_t stream);

}  // namespace octet::cuda::sm80
