// Tensors of a call made ready for kernels: inputs as 16-bit numbers that TMA can read, outputs as rows of whole
// 16-byte words. What already lies so is used in place; the rest goes through the workspace.
#pragma once
#include <cuda_runtime_api.h>

#include "core/tensor.h"
#include "cuda/fragment/output.h"
#include "cuda/fragment/sinks.h"
#include "cuda/host/workspace.h"
#include "cuda/preprocess/cast.h"

namespace octet::cuda {

Strided strided(const View& t);
Output output(const View& t);
Sinks sinks(const View& t);

// An input and where the kernel finds it.
class Input {
 public:
  // `type`: what the kernel multiplies.
  Input(const View& from, octet_dtype type, WorkspaceAllocator& workspace);
  // Copies, if it must.
  void preprocess(cudaStream_t stream) const;
  const View& view() const { return view_; }

 private:
  View from_, view_;
};

// An f16 input times a power of two per (batch, head), for bf16 numbers that f16 might not hold; with `mean_columns`
// less a vector near all tokens (preprocess/cast.h) with that many channels.
class ScaledInput {
 public:
  // `through`: rounded to this type first.
  ScaledInput(const View& from, octet_dtype through, int mean_columns, WorkspaceAllocator& workspace);
  void preprocess(const SeenKeys& seen, cudaStream_t stream) const;
  const View& view() const { return view_; }
  const float* scale() const { return scale_; }       // [batch, head], what products must be multiplied by
  const float* v_mean() const { return mean_.data; }  // [batch, head, mean_columns]

 private:
  View from_, view_;
  octet_dtype through_;
  float* scratch_;
  float* scale_;
  VMean mean_;
};

// An output and where the kernel writes it.
class Result {
 public:
  Result(const View& to, WorkspaceAllocator& workspace);
  // Copies what the kernel wrote to the caller, if it must.
  void deliver(cudaStream_t stream) const;
  Output output() const { return cuda::output(view_); }

 private:
  View to_, view_;
};

}  // namespace octet::cuda
