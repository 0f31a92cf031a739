// Key masks of few queries (operands/key_mask.h): the keys that each batch element sees are listed, and nothing is
// copied. The list is the block table of a KV cache whose pages have one token each.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>

#include "core/problem.h"
#include "cuda/host/workspace.h"

namespace octet::cuda {

// A problem with a key mask as one with a cache (operands/rewritten.h), whose results are those of the given one.
class ListedKeys {
 public:
  // With a null workspace the list lies nowhere, but its address is not null.
  ListedKeys(const Problem& p, void* workspace);
  const Problem& problem() const { return problem_; }
  std::size_t bytes() const { return bytes_; }  // of the workspace
  std::string note() const { return " that a mask leaves"; }
  void preprocess(cudaStream_t stream) const;
  void deliver(cudaStream_t) const {}

 private:
  ListedKeys(const Problem& p, WorkspaceAllocator&& workspace);

  Problem problem_;
  View mask_;
  int64_t apart_;  // from the first key of a batch element to that of the next, in keys
  int *list_, *counts_;
  std::size_t bytes_;
};

// Returns whether the keys of a problem can be listed: it has a key mask, the tokens of k and v lie evenly apart, and
// neither o_residual nor dropout, which problems with a cache have not, is asked for.
bool can_list_keys(const Problem& p);

}  // namespace octet::cuda
