// Bias correction gproj (GProj, arXiv 2609.34272) takes from dq and dk what rounding ds to a row sum other than that of
// the exact ds put there. The sink counts as one more key of the row:
//
//   lambda_i = (sum_j ds_ij + p_sink (dlse - delta) - dlse) / (sum_j p_ij + p_sink), with p and ds as rounded for dk
//   dq_i -= lambda_i sum_j p_ij k_j    dk_j -= sum_i p_ij (lambda_i q_i)    dsink -= sum_i lambda_i p_sink
//
// The rows must be known before the first tile of keys is computed, so a kernel of its own sums them (row_sums.h). With
// a softcap, p in dq and dk is multiplied by its derivative and rounded again, and the rows are those of ds before it.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/bwd/params.h"
#include "cuda/fragment/sinks.h"
#include "cuda/fragment/strided.h"

namespace octet::cuda::sm80 {

struct Projection {
  float* lambda;  // [batch, head, q block, query], in the scale of the delta of the query's part; null: no projection
  Sinks sinks;
  Strided lse, dlse;  // the caller's; dlse may be absent
};

// What the kernels need of shared memory beside that of others.
template <bool projects, int Queries, int TileBytes, int ColumnParts>
struct ProjectionMemory {};
template <int Queries, int TileBytes, int ColumnParts>
struct ProjectionMemory<true, Queries, TileBytes, ColumnParts> {
  alignas(128) unsigned char p[TileBytes];  // p times the derivative of a softcap
  float lambda[2][Queries];                 // of two stages
  // Of the rows of p and of ds, by the warps that share these.
  float p_sums[ColumnParts][Queries], ds_sums[ColumnParts][Queries];
};

// Adds lambda to delta of the first part's rows, for kernels after the mainloop: p (dp - delta - lambda) is ds less its
// projection where nothing is rounded.
void add_lambda_to_delta(const BackwardParams& a, const float* lambda, cudaStream_t stream);

}  // namespace octet::cuda::sm80
