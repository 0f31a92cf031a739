// Operands without tokens that a mask tensor hides from all others: copies in which these are 0. They may hold
// anything, and 0 times inf or NaN would be NaN; nor do they count in statistics.
#pragma once
#include <cuda_runtime_api.h>

#include "core/problem.h"
#include "cuda/fragment/strided.h"
#include "cuda/host/workspace.h"
#include "cuda/operands/mask_tensor.h"

namespace octet::cuda {

// The v of a forward pass. Without a mask tensor it is v itself.
class SeenValues {
 public:
  SeenValues(const Problem& p, WorkspaceAllocator& workspace);
  void preprocess(cudaStream_t stream) const;
  const View& view() const { return view_; }

 private:
  const Problem& p_;
  View view_;
  unsigned char* seen_ = nullptr;  // [batch, kv_head, key], or those that the mask tells apart
  int batches_, heads_;
};

// The operands of a backward pass. Without a mask tensor they are those of the problem.
class SeenOperands {
 public:
  SeenOperands(const Problem& p, WorkspaceAllocator& workspace);
  void preprocess(cudaStream_t stream) const;

  Strided q, k, v, do_;  // of the problem, or the copies

 private:
  const Problem& p_;
  unsigned char* flags_ = nullptr;  // [mask's batch, mask's head][queries, then keys]: 1 for a token that is seen
  int batches_, heads_;             // of the mask tensor: 1 where it is the same for all
};

}  // namespace octet::cuda
