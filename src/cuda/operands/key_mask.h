// Key masks: mask tensors of bool that are the same for all heads and queries, as those of padding are.
//
// Attention does not depend on the order of the keys. So the keys that a batch element sees are copied side by side,
// and the call becomes one of packed sequences: sequence b has the queries of batch element b and the keys that it
// sees. One more sequence has no queries and the memory that is left over. The kernels know no mask tensor then, and
// spend nothing on hidden keys.
//
// Dropout counts keys by their places among all (fragment/dropout.h, KeyPlaces), which it is given with the packed
// keys. Blocks of 16 keys that are seen whole are copied first, so that most packed blocks were blocks before.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <optional>
#include <string>

#include "core/problem.h"
#include "cuda/operands/merged_batch.h"

namespace octet::cuda {

// Returns why a problem with a mask tensor cannot run as packed sequences, or nothing if it can: its mask is no key
// mask, or it has an argument that depends on the places of tokens or belongs to a batch element.
std::optional<std::string> no_key_mask_reason(const Problem& p);

// A problem with a key mask as one of packed sequences (operands/rewritten.h).
class PackedKeys {
 public:
  // With a null workspace the operands lie nowhere, but their addresses are not null.
  PackedKeys(const Problem& p, void* workspace);
  const Problem& problem() const { return problem_; }
  std::size_t bytes() const { return bytes_; }  // of the workspace
  std::string note() const { return ", seen keys copied side by side"; }
  bool copies_queries() const { return q_.copies() || tq_.copies(); }
  // Writes the operands of the packed problem.
  void preprocess(cudaStream_t stream) const;
  // Copies its results to those of the problem. Gradients of hidden keys are 0.
  void deliver(cudaStream_t stream) const;

 private:
  PackedKeys(const Problem& p, WorkspaceAllocator&& workspace);

  Problem problem_;
  View mask_, k_, v_, tk_, tv_, dk_, dv_;  // of the problem with the mask
  int64_t queries_;
  MergedBatch q_, tq_, o_, o_residual_, lse_, to_, tlse_, do_, dlse_, dq_;
  int *ranks_, *counts_;  // [mask's batch, key]: its place among the packed keys, -1: hidden; [mask's batch]
  int *cu_seqlens_q_, *cu_seqlens_k_;
  std::size_t bytes_;
};

}  // namespace octet::cuda
