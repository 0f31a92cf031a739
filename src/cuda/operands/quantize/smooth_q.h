// Queries without the means of blocks of them (smooth_q): q = q' + mean, of which q' is quantized, and the product of
// the mean and each key is a term of its logits.
#pragma once
#include <cuda_runtime_api.h>

#include "core/problem.h"
#include "cuda/host/workspace.h"
#include "cuda/operands/quantize/block_logits.h"
#include "cuda/operands/quantize/quantize.h"
#include "cuda/operands/seen.h"

namespace octet::cuda {

class SmoothedQueries {
 public:
  // `k` and its tiles are those that are quantized, `dim` the padded one.
  SmoothedQueries(const Problem& p, const Strided& k, const KeyTiles& keys, int dim, WorkspaceAllocator& workspace);
  const View& q() const { return q_; }  // q', in f32
  const BlockLogits& logits() const { return logits_; }
  // Finds the means of q, and q'.
  void centre(cudaStream_t stream) const;
  // Finds the logits, from k without its own means, [sequence, kv_head, dim], and adds what they lack to mean_logit,
  // the products of q' and the mean of k; null: nobody wants to know.
  void multiply(const float* k_mean, float* mean_logit, cudaStream_t stream) const;

 private:
  const Problem& p_;
  Strided k_;
  KeyTiles q_blocks_, keys_;
  int dim_;
  SeenQueries seen_;
  View q_;
  float* means_;  // [batch, head, block, dim]
  BlockLogits logits_;
};

}  // namespace octet::cuda
