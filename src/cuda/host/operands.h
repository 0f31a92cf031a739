// Tensors of a call made ready for kernels: inputs as 16-bit numbers that TMA can read, outputs as rows of whole
// 16-byte words. What already lies so is used in place; the rest goes through the workspace.
#pragma once
#include <cuda_runtime_api.h>

#include "core/tensor.h"
#include "cuda/attn/output.h"
#include "cuda/attn/sinks.h"
#include "cuda/host/workspace.h"
#include "cuda/quant/copy.h"

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
  void prepare(cudaStream_t stream) const;
  const View& view() const { return view_; }

 private:
  View from_, view_;
};

// An f16 input times a power of two per (batch, head), for bf16 numbers that f16 might not hold; with `center_columns`
// less a vector near all tokens (quant/copy.h) with that many channels.
class ScaledInput {
 public:
  // `through`: rounded to this type first.
  ScaledInput(const View& from, octet_dtype through, int center_columns, WorkspaceAllocator& workspace);
  void prepare(const SeenKeys& seen, cudaStream_t stream) const;
  const View& view() const { return view_; }
  const float* scale() const { return scale_; }         // [batch, head], what products must be multiplied by
  const float* center() const { return center_.data; }  // [batch, head, center_columns]

 private:
  View from_, view_;
  octet_dtype through_;
  float* scratch_;
  float* scale_;
  Center center_;
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
