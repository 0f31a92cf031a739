// The operands of a backward pass with a mask tensor: copies in which tokens that it hides from all others are 0, so
// that they neither count in statistics nor meet any sum.
#pragma once
#include "core/problem.h"
#include "cuda/fragment/strided.h"
#include "cuda/host/workspace.h"
#include "cuda/sm80/logits.h"

namespace octet::cuda::sm80 {

class SeenOperands {
 public:
  SeenOperands(const Problem& p, const LogitTerms& terms, WorkspaceAllocator& workspace);
  // Writes the copies. Without a mask tensor there are none.
  void preprocess(const Problem& p, const LogitTerms& terms, cudaStream_t stream) const;

  Strided q, k, v, do_;  // of the problem, or the copies

 private:
  unsigned char* flags_ = nullptr;  // [mask's batch, mask's head][queries, then keys]: 1 for a token that is seen
};

}  // namespace octet::cuda::sm80
