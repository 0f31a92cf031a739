// What surrounds the backward kernel: operands into tiles, delta, dq out of its sums. See sm90/bwd/params.h.
//
// Exponents of two and the mean of k are chosen by a sample of each head, before its tiles are written. While they are,
// the true largest numbers are found; where those leave the room that the sample left, `mend` writes a head again. Of k
// and v that the kernel converts itself the sample is all that is known.
#pragma once
#include <cuda_runtime_api.h>
#include <octet/octet.h>

#include "cuda/fragment/mask.h"
#include "cuda/fragment/sinks.h"
#include "cuda/fragment/strided.h"
#include "cuda/sm90/bwd/config.h"
#include "cuda/sm90/bwd/params.h"

namespace octet::cuda::sm90 {

// How large the numbers of one (batch, kv head) are, those that are finite, in the caller's units.
struct Sizes {
  float q, do_;          // the largest
  float do_row;          // the largest |x|_2 of a row
  float reach;           // the largest |delta| / |do|; no larger than v_row where o and lse are of these keys
  float k, k_smooth, v;  // the largest; k_smooth: k less its mean
  float v_row;           // the largest |x|_2 of a row
  float dlse;            // the largest
  // A power of two near the median of those that are not 0. Of a sample only.
  float typical_do_row, typical_dlse;
};

struct PreprocessParams {
  Strided q, k, v, do_, o, o_residual, lse;  // o_residual: may be absent
  Strided dlse;                              // may be absent
  Sinks sinks;
  int tile_dim;                                     // of q, k, v and do in tiles
  octet_dtype type;                                 // of tiles: f16 or bf16
  octet_dtype round_do, round_q, round_k, round_v;  // first
  bool scaled;                                      // by exponents of two
  bool smooth;                                      // subtract the mean of k
  Blocks q_blocks, k_blocks;
  Mask mask;
  int group;
  int weight_exponent;
  float scale;  // of the logits

  Sizes *sampled, *sizes;                                 // [batch, kv_head]: of a sample, of all numbers
  Exponents* exponents;                                   // [batch, kv_head][part]
  float* mean;                                            // [batch, kv_head][dim]: of k in the sample, rounded
  unsigned char *q_tiles, *k_tiles, *v_tiles, *do_tiles;  // no k_tiles: the kernel converts k and v itself
  unsigned char* rows;                                    // of QueryRows; of parts where operands are scaled
  float* row_sums;                                        // see BackwardParams
  void* dq;                                               // set to 0 for the first `zeroed_heads` (batch, kv head)
  int zeroed_heads;
  unsigned* zeroed;   // [batch, kv_head]: set to 0
  unsigned* counter;  // set to 0
};

void preprocess(const PreprocessParams& p, cudaStream_t stream);

// dsinks, of whatever has been params, all of them.
void sum_dsinks(const PreprocessParams& p, const Strided& dsinks, cudaStream_t stream);

// dq = scale times the sums.
void postprocess_dq(const BackwardParams& a, int tile_dim, Sums sums, const Strided& dq, cudaStream_t stream);

// Rows of dq, dk and dv again that are not finite because of what a mask hides from them.
void recompute_masked(const PreprocessParams& p, const BackwardParams& a, const Strided& dq, cudaStream_t stream);

}  // namespace octet::cuda::sm90
