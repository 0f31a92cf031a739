// f32 operands as three bf16 parts, each in `dim` columns of a row: their sum is the number.
#pragma once
#include <cuda_runtime_api.h>

#include "core/tensor.h"
#include "cuda/fragment/output.h"
#include "cuda/host/workspace.h"

namespace octet::cuda::sm80 {

class PartsInput {
 public:
  // `dim`: channels of a part; those beyond the tensor are 0.
  PartsInput(const View& from, int dim, WorkspaceAllocator& workspace);
  void preprocess(cudaStream_t stream) const;
  Output view() const;

 private:
  View from_;
  int dim_;
  void* parts_;  // [batch, head, token, part, dim]
};

}  // namespace octet::cuda::sm80
