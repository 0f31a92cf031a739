// Operands without tokens that a mask tensor hides from all others: copies in which these are 0. They may hold
// anything, and 0 times inf or NaN would be NaN; nor do they count in statistics.
#pragma once
#include <cuda_runtime_api.h>

#include "core/problem.h"
#include "cuda/fragment/strided.h"
#include "cuda/host/workspace.h"
#include "cuda/operands/mask_tensor.h"
#include "cuda/operands/quantize/quantize.h"
#include "cuda/operands/token_flags.h"

namespace octet::cuda {

// A forward pass reads k as it is; if it takes statistics of k, it reads a copy in which hidden keys are 0.
enum class ReadsK { as_it_is, seen };

// The v of a forward or jvp pass, its tangent, and k. Without a mask tensor they are those of the problem, and so is a
// v of integers: a code is finite, and the P of a hidden one is 0.
class SeenKeySide {
 public:
  SeenKeySide(const Problem& p, ReadsK reads_k, WorkspaceAllocator& workspace);
  void preprocess(cudaStream_t stream) const;
  const View& k() const { return k_; }
  const View& v() const { return v_; }
  const View& tv() const { return tv_; }
  // Which keys of each (batch, kv_head) are seen; with ReadsK::seen.
  SeenByMask seen() const { return counts_ ? SeenByMask{flags(), counts_} : SeenByMask{}; }

 private:
  TokenFlags flags() const { return {seen_, batches_, heads_, p_.tokens_k}; }

  const Problem& p_;
  View k_, v_, tv_;
  unsigned char* seen_ = nullptr;  // [batch, kv_head, key], or those that the mask tells apart
  int* counts_ = nullptr;
  int batches_, heads_;
};

// The queries that a mask tensor leaves some key.
class SeenQueries {
 public:
  SeenQueries(const Problem& p, WorkspaceAllocator& workspace);
  void preprocess(cudaStream_t stream) const;
  const TokenFlags& flags() const { return flags_; }  // null data: there is no mask tensor

 private:
  const Problem& p_;
  TokenFlags flags_{};
};

// The operands of a backward pass. Without a mask tensor they are those of the problem.
class SeenOperands {
 public:
  SeenOperands(const Problem& p, WorkspaceAllocator& workspace);
  void preprocess(cudaStream_t stream) const;

  Strided q, k, v, do_;                                 // of the problem, or the copies
  SeenByMask seen() const { return {keys_, counts_}; }  // which keys of each (batch, kv_head) are seen

 private:
  const Problem& p_;
  TokenFlags queries_{}, keys_{};
  int* counts_ = nullptr;
};

}  // namespace octet::cuda
