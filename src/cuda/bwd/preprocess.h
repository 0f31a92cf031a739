// The kernels before and after the backward kernel: they write operands as tiles (params.h), compute delta,
// and convert the sums of dq.
//
// The exponents and the mean of k are chosen from a sample of each head, before its tiles are written. The largest
// numbers of the head are found while its tiles are written. Where they exceed the headroom of the sample's exponents,
// rescale.cu writes the tiles of the head again. Where the backward kernel converts k and v itself, they are read for
// their largest numbers if sums of dq are integers; else only their sample is known.
#pragma once
#include <cuda_runtime_api.h>
#include <octet/octet.h>

#include "cuda/bwd/params.h"
#include "cuda/bwd/tile_sizes.h"
#include "cuda/fragment/dropout.h"
#include "cuda/fragment/mask.h"
#include "cuda/fragment/sinks.h"
#include "cuda/fragment/strided.h"
#include "cuda/operands/mask_rows.h"
#include "cuda/operands/token_flags.h"
#include "cuda/ptx/types.h"

namespace octet::cuda {

// The magnitudes of the finite numbers of one (batch, kv head), without any exponent.
struct Sizes {
  float q, do_;       // the largest
  float do_row;       // the largest |x|_2 of a row
  float delta_ratio;  // the largest |delta| / |do|; no larger than v_row, times dropout_scale, where o and lse are of
                      // these keys
  float k, k_smooth, v;  // the largest; k_smooth: of k minus its mean
  float v_row;           // the largest |x|_2 of a row
  float q_row, k_row;    // likewise; known for a sample only
  float dlse;            // the largest
  // A power of two near the median of the rows that are not 0; known for a sample only.
  float typical_do_row, typical_dlse;
};

// At int8, s and dp are products of integers (operands/quantize/training.h). Delta is that of do as it is in int8, of o
// minus the mean of v. A token whose scale is NaN is not finite: it is written as zeros, and a query of this kind, or
// whose delta is not finite, has an lse of NaN, so that it reaches what sees it and nothing else.
struct Int8Inputs {
  const S8* do_;  // [batch, head, token, dim]; null: another precision
  const float *q_scale, *do_scale, *k_scale;
  const float* v_mean;  // [sequence, kv_head, dim]
  int dim, keys;        // keys: rows of a head of k
  float* scales;        // [batch, head, q block][2, query]: those of q and do, 0 for those that are not finite
  float* mean_delta;    // [batch, head, q block, query]: what delta lacks; null: not wanted
};

struct PreprocessParams {
  Strided q, k, v, do_, o, o_residual, lse;  // o_residual: may be absent
  Strided dlse;                              // may be absent
  Sinks sinks;
  int tile_dim;                                     // the dim of q, k, v and do in tiles
  int block_channels, block_channels_v;             // of q and k, of v and do: see channel_of
  octet_dtype type;                                 // the type of tiles: f16 or bf16
  octet_dtype round_do, round_q, round_k, round_v;  // the type to round to first
  bool scaled;                                      // true: operands are multiplied by powers of two
  bool smooth;                                      // true: k is centred by its mean
  bool measures_all_keys;                           // true: the sizes of all keys are found, not only of a sample
  Blocks q_blocks, k_blocks;
  Mask mask;
  int group;
  float scale;          // softmax_scale
  float dropout_scale;  // of elements of dp that dropout keeps; 1 without dropout

  Sizes *sampled, *sizes;  // [batch, kv_head]: of a sample; of all numbers
  Exponents* exponents;    // [bin][batch, kv_head]
  unsigned* divided;       // the number of (batch, kv head)s with several bins, then these
  float* mean;             // [batch, kv_head][dim]: of k in the sample, see stats.cu
  unsigned char *q_tiles, *k_tiles, *v_tiles, *do_tiles;  // null k_tiles: the kernel converts k and v
  unsigned char* rows;                                    // QueryRows, of each bin where `scaled`
  float* row_sums;                                        // see BackwardParams
  void* dq;                                               // set to 0 for the first `zeroed_heads` (batch, kv head)
  int zeroed_heads;
  unsigned* zeroed;    // [batch, kv_head]: set to 0
  unsigned* counters;  // [Bins]: set to 0
  Int8Inputs int8;
  // Tokens that a mask tensor hides from all others may hold anything: they are read as zeros. Null data: none is
  // hidden.
  TokenFlags seen_queries, seen_keys;
  MaskRows mask_rows;  // whose row biases become QueryRows::dq_row_scale; null biases: they do not
};

// Returns whether a token is seen: all are, where there are no flags.
__device__ inline bool sees(const TokenFlags& flags, int batch, int head, int64_t token) {
  return !flags.data || flags.of(batch, head)[token];
}

void preprocess(const PreprocessParams& p, cudaStream_t stream);

// Computes dsinks, from the QueryRows that preprocess() has written.
void sum_dsinks(const PreprocessParams& p, const Strided& dsinks, cudaStream_t stream);

// Converts the sums of dq to dq.
void postprocess_dq(const BackwardParams& a, int tile_dim, Sums sums, const Strided& dq, cudaStream_t stream);

// Recomputes the rows of dq, dk and dv that are not finite because of tokens that the mask hides.
void recompute_masked(const PreprocessParams& p, const BackwardParams& a, const Strided& dq, cudaStream_t stream);
void recompute_masked(const PreprocessParams& p, const BackwardParams& a, const Dropout& dropout, const Strided& dq,
                      cudaStream_t stream);

}  // namespace octet::cuda
