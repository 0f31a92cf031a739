// The parameters of the forward kernels.
#pragma once
#include "cuda/fragment/dropout.h"
#include "cuda/fragment/mask.h"
#include "cuda/fragment/output.h"
#include "cuda/fragment/page_table.h"
#include "cuda/fragment/sinks.h"
#include "cuda/fragment/softmax_8bit.h"
#include "cuda/operands/quantize/block_logits.h"
#include "cuda/operands/quantize/zero_point.h"
#include "cuda/scheduler/tile_scheduler.h"
#include "cuda/sm80/f16_halves.h"
#include "cuda/sm80/key_factors.h"
#include "cuda/sm80/logits.h"
#include "cuda/sm80/mask_classes.h"

namespace octet::cuda::sm80 {

// A thread block that computes one split of the keys writes this for each row, beside o: o is divided by l, the sum of
// p = exp2(logit in base 2 - origin), and logits lack row_bias (fragment/finish.h).
struct RowStatistics {
  float origin, l, row_bias;
};

// The factors of the products of queries and the means of blocks of keys, where k is centred by those: q in f16 as
// q_factors has its tokens, and the means as BlockMeans has them, with the blocks of a head.
struct MeanFactors {
  const F16* q;
  const float* q_factor;
  const F16* mean;
  const float* mean_factor;
  int blocks;
};

// How far tokens of k or v lie apart in pages, in chunks of 16 bytes: between pages, and in a page.
struct PageChunks {
  unsigned of_page, of_token;
};

struct ForwardParams {
  Output q, k, v;                                // in the kernel's element types
  TokenFactors q_factors, k_factors, v_factors;  // where operands are f16 halves; q_factors also where q is int8
  // These are for int8 q and k: the factors of keys, and the product of each query with the mean subtracted from k.
  KeyPairFactorsView k_pair_factors;
  const float* v_factors_by_tiles;  // where v is int8 too: those of its scales, as quantize.h has them
  LargestCode largest_p;            // likewise
  // The zero points that int8 operands came with (operands/quantize/prequantized.h), of kernels with general logits;
  // null: none.
  const ZeroPoint *q_zero_points, *k_zero_points;
  const signed char* v_zero_points;
  BlockLogits block_logits;  // likewise
  TokenFactors mean_logit;   // null: nobody wants to know
  TileScheduler scheduler;
  Mask mask;
  int group;  // heads of q per head of k and v; with few queries, heads of tiles
  int dim, dim_v;
  bool whole_columns;  // true: these are the kernel's
  float scale_log2e;
  LogitTerms terms;        // of kernels with general logits
  float beta, beta_limit;  // of bias correction beta; beta_limit in logits; 0: another one
  const float* v_scale;    // [batch, kv_head]: the power of two that v was divided by; or null
  const float* v_mean;  // [batch, kv_head, the kernel's dim_v]: subtracted from v; of kCompensated precisions, and of
                        // int8 [sequence, ...]
  const float* v_channel_scale;  // [sequence, kv_head, the kernel's dim_v]: of v in e4m3 with scales
  Output o, o_residual, lse;
  Sinks sinks;
  // With few queries:
  int tile_heads;  // heads that are rows of a tile
  // [batch x split, head, token], as o: each thread block writes its split. Null where keys are not split.
  Output statistics;
  MaskClasses mask_classes;       // of kernels for mask tensors
  MeanFactors mean_factors;       // of int8's training
  Dropout dropout;                // of kernels with general logits
  PageTable pages;                // of kernels that read pages, of which k and v have their strides
  PageChunks k_chunks, v_chunks;  // likewise
  Output k_scales, v_scales;      // of their codes, f32 in pages too
};

}  // namespace octet::cuda::sm80
