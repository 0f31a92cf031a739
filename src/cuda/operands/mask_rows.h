// A mask tensor as Hopper's kernels read it: with the row bias of each of its rows, the tokens that it leaves to
// others, and in 16 bits for TMA.
#pragma once
#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "cuda/host/workspace.h"
#include "cuda/operands/mask_tensor.h"
#include "cuda/operands/token_flags.h"

namespace octet::cuda {

// The row bias is the largest number that the mask adds to a logit of the row, or 0 if that is not finite: kernels
// leave it out of logits, as a large number common to a row would take the bits of the logits. It changes nothing but
// lse.
struct MaskRows {
  MaskTensor mask;    // as the caller has it
  float* biases;      // [batch, head, query], or those that differ; null: 0
  int64_t stride[3];  // of the biases

  __device__ float bias(int batch, int head, int query) const {
    return biases ? biases[batch * stride[0] + head * stride[1] + query * stride[2]] : 0.f;
  }
  __device__ float number(int batch, int head, int query, int key) const {
    return mask_number(mask.element, mask.data, mask.row(batch, head, query) + key * mask.stride[3]);
  }
};

// Finds by one launch, of a mask tensor that is not f32, the row biases, the keys that some query sees, and the queries
// that see some key. The other keys and queries may hold anything, and do not count in statistics.
class MaskSummary {
 public:
  enum class Seen { none, keys, keys_and_queries };
  MaskSummary(const Problem& p, Seen seen, WorkspaceAllocator& workspace);
  void preprocess(cudaStream_t stream) const;
  const MaskRows& rows() const { return rows_; }
  // The flags of keys belong to heads of k, those of queries to heads of q. Both lack data if there is no mask tensor
  // or the caller does not ask for them.
  const TokenFlags& seen_keys() const { return seen_keys_; }
  const TokenFlags& seen_queries() const { return seen_queries_; }

 private:
  const Problem& p_;
  MaskRows rows_;
  TokenFlags seen_keys_{}, seen_queries_{};
};

// A mask tensor as TMA reads it, in bf16 or f16: that of the problem, or a copy. A mask that is the same for all
// queries has as many rows as a box, `rows`.
class MaskTiles {
 public:
  MaskTiles(const Problem& p, octet_dtype type, int rows, WorkspaceAllocator& workspace);
  void preprocess(cudaStream_t stream) const;
  const View& view() const { return view_; }
  // Sets {query, head, batch} to 0 where the mask is the same for all, else to 1.
  void set_broadcast(int (&broadcast)[3]) const;

  // Returns why a mask has no such form, or nothing.
  static std::optional<std::string> unsupported_reason(const Problem& p, octet_dtype type);

 private:
  const Problem& p_;
  View view_;
};

}  // namespace octet::cuda
