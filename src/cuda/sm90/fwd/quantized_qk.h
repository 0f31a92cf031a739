// What the launches with quantized values of 8 bits share.
#pragma once
#include <cuda_runtime_api.h>

#include "core/problem.h"
#include "cuda/host/workspace.h"
#include "cuda/preprocess/quantize.h"

namespace octet::cuda::sm90 {

// The rotation of q and k of `dim` channels, signs from kHadamardSeed.
Rotation rotation_of(int64_t dim);

// Whether it matters what k's mean adds to all logits of a row.
bool wants_mean_logit(const Problem& p);

// Dense [batch, head, row, column] bytes.
View view_8bit(void* data, int64_t batch, int64_t heads, int64_t rows, int64_t columns);

// Columns of the boxes in which TMA reads bytes: panels as SharedTile8Bit has them.
int panel_bytes(int64_t columns);

// q and k as int8 with a scale for each token, k less its mean, keys in whole tiles of `tile`.
class Int8Logits {
 public:
  // `dim`: the kernel's.
  Int8Logits(const Problem& p, int64_t dim, int tile, WorkspaceAllocator& workspace);
  void quantize(cudaStream_t stream) const;
  unsigned* counter() const { return static_cast<unsigned*>(scratch_); }       // 0 after `preprocess`
  View q() const { return view(codes_.q_quantized, codes_.heads, queries_); }  // [batch, head, token, dim]
  View k() const { return view(codes_.k_quantized, codes_.kv_heads, keys_); }  // [batch, kv_head, keys, dim]
  int keys() const { return static_cast<int>(keys_); }
  const float* q_scale() const { return codes_.q_scale; }
  const float* k_scale() const { return codes_.k_scale; }
  const float* mean_logit() const { return codes_.mean_logit; }  // null where nothing wants it

 private:
  View view(void* data, int64_t heads, int64_t rows) const;

  QuantizeParams codes_;
  int64_t batch_, dim_, queries_, keys_;
  void* scratch_;
};

}  // namespace octet::cuda::sm90
