// q and k as int8, also v, and what other quantized operands share with them.
#pragma once
#include <cuda_runtime_api.h>

#include <memory>
#include <optional>

#include "core/prequantized.h"
#include "cuda/host/workspace.h"
#include "cuda/operands/quantize/block_logits.h"
#include "cuda/operands/quantize/block_scales.h"
#include "cuda/operands/quantize/prequantized.h"
#include "cuda/operands/quantize/quantize.h"

namespace octet::cuda {

class SeenQueries;
class SmoothedQueries;

// Returns the Hadamard rotation of q and k of `dim` channels, with the signs of kHadamardSeed.
Rotation rotation_of(int64_t dim);

// True where a result depends on what the mean of k adds to all logits of a row.
bool wants_mean_logit(const Problem& p);

// Returns the scales of a tensor of e4m3 that came quantized with one for each head.
HeadScale head_scale(const View& t);

// Returns the view of a dense [batch, head, row, column] array of bytes.
View view_8bit(void* data, int64_t batch, int64_t heads, int64_t rows, int64_t columns);

// k and v of a problem, or copies without the keys that a mask tensor hides.
struct KeySide {
  View k, v;
  SeenByMask seen{};
  bool quantizes_v = false;
  bool k_groups = false;                 // thread groups of k share a scale
  bool blocks = false;                   // blocks of tokens share one (block_scales.h)
  bool finds_v_channels = false;         // the scales of the channels of v, which becomes e4m3 (e4m3.h)
  bool qk_came = false, v_came = false;  // as codes of int8 or uint8, which are not quantized again
};

// Returns the parameters of quantize() that follow from a problem, without formats, channels and memory.
QuantizeParams quantize_params(const Problem& p, const KeySide& key_side, int64_t dim, int tile);

// q and k quantized to int8 with a scale for each token, and v too if it is wanted. k and v are centred by their means,
// and keys are padded to whole tiles of `tile` keys. Those that came in the recipe's own form keep their codes, scales
// and means. Where blocks of tokens share a scale, it is that of each of them, and v keeps its mean.
class Int8Logits {
 public:
  // `dim` is the kernel's, `tile` the keys that it takes at a time.
  Int8Logits(const Problem& p, const KeySide& key_side, int64_t dim, int tile, WorkspaceAllocator& workspace);
  void quantize(cudaStream_t stream) const;
  unsigned* counter() const { return static_cast<unsigned*>(scratch_); }         // 0 after quantize()
  View q() const { return view(params_.q_quantized, params_.heads, queries_); }  // [batch, head, token, dim]
  View k() const { return view(params_.k_quantized, params_.kv_heads, keys_); }  // [batch, kv_head, keys, dim]
  int keys() const { return static_cast<int>(keys_); }
  const float* q_scale() const { return params_.q_scale; }
  const float* k_scale() const { return params_.k_scale; }
  const float* mean_logit() const { return params_.mean_logit; }  // null where it is not needed
  // [batch, head, block] where blocks of q and k share a scale.
  const float* q_block_scale() const { return q_rows_->block_scale; }
  const float* k_block_scale() const { return k_rows_->block_scale; }
  // These are of a quantized v: its values with keys along rows, [batch, kv_head, dim, keys], scales and means.
  View v() const { return view_8bit(params_.v_quantized, batch_, params_.kv_heads, params_.dim, keys_); }
  const float* v_scale() const { return params_.v_scale; }
  const float* v_mean() const { return v_mean_ ? v_mean_->to : params_.channels.v_mean; }
  // The zero points that q and k came with; null: none. Then sums of products are integers of up to 24 bits.
  const ZeroPoint* q_zero_point() const { return q_came_ ? q_came_->zero_point : nullptr; }
  const ZeroPoint* k_zero_point() const { return k_came_ ? k_came_->zero_point : nullptr; }
  const signed char* v_zero_point() const { return v_came_ ? v_came_->zero_point : nullptr; }
  // The products to add to the logits of centred queries; null data: queries are not centred.
  BlockLogits block_logits() const;
  const KeyTiles& key_tiles() const { return params_.keys; }
  const Channels& channels() const { return params_.channels; }

 private:
  View view(void* data, int64_t heads, int64_t rows) const;
  void copy_as_they_came(const Problem& p, bool q_and_k, bool v, WorkspaceAllocator& workspace);
  // Those of a tensor that came quantized; of none they are zeros.
  PrequantizedMeans means_of(const View& from, uint64_t seed, int64_t sequences, bool packed,
                             WorkspaceAllocator& workspace) const;
  void quantize_by_blocks(const Problem& p, bool q_and_k, bool v, WorkspaceAllocator& workspace);

  QuantizeParams params_;
  int64_t batch_, dim_, queries_, keys_;
  void* scratch_;
  std::shared_ptr<const SmoothedQueries> smoothed_q_;
  std::optional<PrequantizedMeans> k_mean_, v_mean_;  // of those that came quantized
  std::optional<PrequantizedRows> q_came_, k_came_;
  std::optional<PrequantizedValues> v_came_;
  std::shared_ptr<const SeenQueries> seen_queries_;          // of operands whose blocks share a scale
  std::optional<BlockScaledRows> q_rows_, k_rows_, v_rows_;  // likewise; v_came_ has the codes of v
};

}  // namespace octet::cuda
