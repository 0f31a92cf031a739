// The operands of int8's training: q, k, v and do in int8 with a scale for each token, as the forward pass whose o is
// kept and the backward pass both multiply them (docs/numerics.md, int8). k is centred by the means of its tiles, v by
// the mean of all its tokens.
#pragma once
#include "core/problem.h"
#include "cuda/host/workspace.h"
#include "cuda/operands/quantize/quantize.h"
#include "cuda/ptx/types.h"

namespace octet::cuda {

// Tokens in int8, a scale for each: [batch, head, token, dim] and [batch, head, token]. Keys lie in tiles: each
// sequence begins at a multiple of kBlockKeys. A token that is not finite has a scale of NaN and values of 0.
struct Int8Rows {
  const S8* data;
  const float* scale;
};

class TrainingOperands {
 public:
  // The tensors that are read: those of a problem, or copies in which what a mask tensor hides is 0. `do_` may be
  // absent.
  struct From {
    Strided q, k, v, do_;
    SeenByMask seen;
  };
  // `dim`: channels of rows, 64, 128 or 256.
  TrainingOperands(const Problem& p, const From& from, int dim, WorkspaceAllocator& workspace);
  void quantize(cudaStream_t stream) const;

  Int8Rows q() const { return {static_cast<const S8*>(logits_.q_quantized), logits_.q_scale}; }
  Int8Rows k() const { return {static_cast<const S8*>(logits_.k_quantized), logits_.k_scale}; }
  Int8Rows v() const { return {static_cast<const S8*>(values_.k_quantized), values_.k_scale}; }
  Int8Rows do_() const { return {static_cast<const S8*>(values_.q_quantized), values_.q_scale}; }
  const BlockMeans& block_means() const { return logits_.block_means; }
  const float* v_mean() const { return values_.channels.k_mean; }  // [sequence, kv_head, dim]
  int dim() const { return logits_.dim; }
  int keys() const { return logits_.keys.count() * kBlockKeys; }  // rows of k and v of a head

 private:
  QuantizeParams logits_, values_;
  void *logits_scratch_, *values_scratch_;
};

// q of a problem in f16, each token divided by a power of two: [batch, head, token, dim] and [batch, head, token].
// Tokens that are not finite become 0.
struct F16Rows {
  F16* data;
  float* factor;
};
void scale_rows_to_f16(const Strided& from, int dim, const F16Rows& to, cudaStream_t stream);

// v as f16, from its values in int8: [batch, kv_head, keys, dim], divided by a power of two for each (batch, kv_head),
// which becomes its `scale`.
void values_to_f16(const Int8Rows& v, int64_t heads, int keys, int dim, F16* to, float* scale, cudaStream_t stream);

}  // namespace octet::cuda
