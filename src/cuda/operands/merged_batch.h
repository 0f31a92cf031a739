// Batch elements that become packed sequences: tensors of all their tokens.
#pragma once
#include <cuda_runtime_api.h>

#include "core/tensor.h"
#include "cuda/fragment/strided.h"
#include "cuda/host/workspace.h"

namespace octet::cuda {

// A tensor [batch, head, token, dim] as one batch element with the tokens of all.
class MergedBatch {
 public:
  // The tensor itself, if its strides allow that, or a copy; both may be absent.
  MergedBatch(const View& t, WorkspaceAllocator& workspace);
  const View& view() const { return view_; }
  bool copies() const { return copy_.data != tensor_.data; }
  // Copies the tensor to the copy, if there is one, or back.
  void copy_in(cudaStream_t stream) const;
  void copy_out(cudaStream_t stream) const;

 private:
  View tensor_, copy_, view_;
};

// Returns a tensor's batch elements as one, whose tokens lie as far apart within a batch element as between two.
View merged(View t);
// Returns whether they do, or there are no elements.
bool can_merge(const View& t);

// Returns a contiguous tensor for `tokens` tokens of packed sequences; absent if `t` is.
View packed_tokens(const View& t, int64_t tokens, WorkspaceAllocator& workspace);

// Returns the view of the first tokens of so many sequences.
View cu_seqlens(int* data, int64_t sequences);

// Returns a tensor whose elements are words of `bytes` bytes, of which its rows are made.
Strided of_words(const View& t, int64_t bytes);

}  // namespace octet::cuda
