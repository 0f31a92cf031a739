// KV caches (octet_arguments::seqused_k) as packed sequences, which all kernels compute, or as pages that kernels read.
// Lengths and block table are read on the device.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "cuda/fragment/page_table.h"
#include "cuda/host/backend.h"
#include "cuda/operands/merged_batch.h"
#include "cuda/operands/rewritten.h"

namespace octet::cuda {

// Returns why a problem whose keys lie in a cache cannot run as packed sequences, or nothing if it can.
std::optional<std::string> no_cache_reason(const Problem& p);

// Returns whether the keys of a cache are those of packed sequences as they lie, so that nothing is copied.
bool lies_in_place(const Problem& p);

PageTable page_table(const Problem& p);

// A problem with a cache as one of packed sequences (operands/rewritten.h). Sequences follow each other in the cache
// itself, where they have a batch element each whose tokens lie as far apart as those of two: between two of them is
// then one more, without queries, which has the keys behind the last that is used. Else they are copied side by side,
// and the last of the sequences has the memory that is left over. Where a kernel finds keys by the block table, only
// queries that come packed are; a batch of them stays one, and its kernel reads the lengths.
class CachedKeys {
 public:
  // `reads_pages`: kernels read k and v in their pages. With a null workspace the operands lie nowhere, but their
  // addresses are not null.
  CachedKeys(const Problem& p, bool reads_pages, void* workspace);
  CachedKeys(const CachedKeys&) = delete;  // the problem points into it
  const Problem& problem() const { return problem_; }
  std::size_t bytes() const { return bytes_; }  // of the workspace
  bool in_pages() const { return problem_.k.pages.size; }
  std::string note() const {
    return in_place_ ? ", keys in a cache" : in_pages() ? ", keys in pages" : ", keys of a cache copied side by side";
  }
  void preprocess(cudaStream_t stream) const;
  void deliver(cudaStream_t stream) const;

 private:
  CachedKeys(const Problem& p, bool reads_pages, WorkspaceAllocator&& workspace);

  // The scales of a cache in 8 bits, and those of its copy.
  struct Scales {
    View cache, packed;
    octet_quantization how;
    octet_tensor tensor;
  };
  void pack_scales(const View& cache, Scales& scales, View& packed, WorkspaceAllocator& workspace);

  Problem cached_, problem_;
  int64_t sequences_, most_keys_;  // of the cache; of a sequence
  bool in_place_;
  bool packs_;  // the problem has packed sequences
  MergedBatch q_, o_, lse_;
  Scales k_scales_{}, v_scales_{};
  int *cu_seqlens_q_, *cu_seqlens_k_;
  std::size_t bytes_;
};

// Returns the answer to a problem with a cache, from that to packed sequences. `reads_pages` says whether that of a
// problem can read k and v in their pages.
template <class ReadsPages, class PlanOf>
Answer plan_of_cached(const Problem& p, void* workspace, const ReadsPages& reads_pages, const PlanOf& plan_of_packed) {
  if (auto reason = no_cache_reason(p)) return std::move(*reason);
  auto keys = std::make_shared<const CachedKeys>(p, true, workspace);
  if (!reads_pages(keys->problem())) keys = std::make_shared<const CachedKeys>(p, false, workspace);
  if (auto reason = size_unsupported_reason(keys->problem())) return std::move(*reason);
  return plan_of_rewritten(std::move(keys), workspace, plan_of_packed);
}

}  // namespace octet::cuda
