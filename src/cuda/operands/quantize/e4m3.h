// q, k and v as numbers of e4m3: in bytes or, for kernels that multiply f16, held in f16, which has all of them.
// Numbers and scales equal those of the CPU bit by bit (core/quant).
#pragma once
#include <cuda_runtime_api.h>

#include "core/problem.h"
#include "cuda/host/workspace.h"
#include "cuda/operands/quantize/int8_logits.h"

namespace octet::cuda {

enum class E4m3Form { f16, bytes };

// The rows of one operand before and after. Where `keys` has a tile, rows lie in tiles of keys, as in quantize.h, and
// those of keys that no query sees are 0.
struct E4m3Rows {
  Strided from;
  E4m3Form as;
  void* to;       // [batch, head, row, dim]
  int rows, dim;  // of a head, padded
  int kv_heads;   // of the means and scales of channels
  KeyTiles keys;  // tile 0: rows are tokens
  const int* cu_seqlens;
  int sequences;
  // [sequence, kv_head, dim]; null: none
  const float* mean;      // is subtracted from each row
  const float* inverse;   // of the scales of channels
  const float* key_mean;  // of queries: mean_logit is the product with it
  float* mean_logit;      // [batch, head, row]
  float* scale;           // [batch, head, row]; null: rows have none
  bool as_they_are;       // they came as e4m3, and keep their scales
  Quantization how;       // of rows that came as e4m3, and of v; no scale: 1

  std::size_t count() const { return static_cast<std::size_t>(from.shape[0] * from.shape[1] * rows); }
  View view() const;
  void allocate(WorkspaceAllocator& workspace);
};

// v with the scales of its channels, whose inverses `channels` has, in tiles of keys.
E4m3Rows e4m3_values(const View& v, E4m3Form as, const KeyTiles& keys, const Channels& channels, int dim,
                     WorkspaceAllocator& workspace);
void quantize_to_e4m3(const E4m3Rows& rows, cudaStream_t stream);

// q and k with a scale for each token, k less its mean, and v with one for each channel, k and v in tiles of kBlockKeys
// keys; q and k that came as e4m3 stay as they are, with the scales and the mean of
// their own.
// Without scales all are rounded as they are, token by token.
class E4m3Operands {
 public:
  // `dim`: the kernel's.
  E4m3Operands(const Problem& p, E4m3Form as, const KeySide& key_side, bool scaled, int dim,
               WorkspaceAllocator& workspace);
  void quantize(cudaStream_t stream) const;

  View q() const { return q_.view(); }
  View k() const { return k_.view(); }
  View v() const { return v_.view(); }
  int keys() const { return k_.rows; }
  const float* q_scale() const { return q_.scale; }
  const float* k_scale() const { return k_.scale; }                 // null: there are none
  const float* v_scale() const { return stats_.channels.v_scale; }  // [sequence, kv_head, dim]
  const float* mean_logit() const { return q_.mean_logit; }         // null where it is not needed

 private:
  QuantizeParams stats_;
  std::optional<PrequantizedMeans> k_mean_;  // that k came with
  void* scratch_ = nullptr;
  E4m3Rows q_, k_, v_;
};

}  // namespace octet::cuda
