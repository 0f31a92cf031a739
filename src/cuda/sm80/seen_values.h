// v with zeros in the place of keys that a mask tensor hides from every query: they may hold anything, and 0 times inf
// or NaN would be NaN.
#pragma once
#include <cuda_runtime_api.h>

#include "core/problem.h"
#include "cuda/fragment/strided.h"
#include "cuda/host/workspace.h"
#include "cuda/sm80/logits.h"

namespace octet::cuda::sm80 {

// Lists which keys some query sees of each of `batches` x `heads`, or of those that the mask tells apart: `seen` is 1
// or 0 for [batch, head, key], with `stride` from head to head. `group` heads of the mask share a head of the list.
void list_seen_keys(const Problem& p, const LogitTerms& terms, int64_t batches, int64_t heads, int group,
                    unsigned char* seen, int64_t stride, cudaStream_t stream);

class SeenValues {
 public:
  // Without a mask tensor the values are v itself.
  SeenValues(const Problem& p, WorkspaceAllocator& workspace);
  void preprocess(const LogitTerms& terms, cudaStream_t stream) const;
  const View& view() const { return view_; }

 private:
  const Problem& p_;
  View view_;
  unsigned char* seen_ = nullptr;  // [batch, kv_head, key], or those that the mask tells apart
  int64_t batches_, heads_;
};

}  // namespace octet::cuda::sm80
