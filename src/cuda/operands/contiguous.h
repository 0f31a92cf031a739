// The tensors of a call in the form that kernels need: inputs as 16-bit numbers that TMA can read, outputs as rows of
// whole 16-byte words. Tensors that already have this form are used in place; the others are copied through the
// workspace.
#pragma once
#include <cuda_runtime_api.h>

#include <initializer_list>

#include "core/tensor.h"
#include "cuda/fragment/output.h"
#include "cuda/fragment/sinks.h"
#include "cuda/host/workspace.h"
#include "cuda/operands/cast.h"

namespace octet::cuda {

// Returns a tensor of t's shape in the workspace whose dimensions follow each other from the first of `order`, the
// innermost, on; those that it leaves out keep their stride, of 0, and take no memory. Rows of 8-bit elements are
// padded to whole words of 16 bytes; rows of wider types are whole words already.
View contiguous(View t, octet_dtype type, WorkspaceAllocator& workspace,
                std::initializer_list<int> order = {3, 2, 1, 0});

Strided strided(const View& t);
Output output(const View& t);
Sinks sinks(const View& t);

// An input, and the tensor that the kernel reads for it.
class Input {
 public:
  // `type`: the operand type of the kernel.
  Input(const View& from, octet_dtype type, WorkspaceAllocator& workspace);
  // Copies the input where it cannot be read in place.
  void preprocess(cudaStream_t stream) const;
  const View& view() const { return view_; }

 private:
  View from_, view_;
};

// An input in f16 times a power of two per (batch, head), for bf16 numbers beyond the range of f16. With `mean_columns`
// it is also centred by a mean with that many channels (operands/cast.h).
class ScaledInput {
 public:
  // Numbers are rounded to the type `through` first.
  ScaledInput(const View& from, octet_dtype through, int mean_columns, WorkspaceAllocator& workspace,
              const VRange& range = {});
  // `flags`: the tokens that a mask tensor leaves to some query.
  void preprocess(const SeenKeys& seen, cudaStream_t stream, const TokenFlags& flags = {}) const;
  // The same by the kernel itself, where it can; this clears its counter.
  bool in_slices(const SeenKeys& seen) const;
  VSlices find_v_stats(const SeenKeys& seen, const TokenFlags& flags, unsigned* counter, cudaStream_t stream) const;
  const View& view() const { return view_; }
  const float* scale() const { return scale_; }       // [batch, head], the factor that products must be multiplied by
  const float* v_mean() const { return mean_.data; }  // [batch, head, mean_columns]

 private:
  View from_, view_;
  octet_dtype through_;
  VRange range_;
  float* scratch_;
  float* scale_;
  VMean mean_;
};

// An output, and the tensor that the kernel writes for it.
class Result {
 public:
  Result(const View& to, WorkspaceAllocator& workspace) : Result(to, to.dtype, workspace) {}
  // `type`: the one in which the kernel writes it.
  Result(const View& to, octet_dtype type, WorkspaceAllocator& workspace);
  // Copies the result to the caller's tensor where the kernel could not write it in place.
  void deliver(cudaStream_t stream) const;
  Output output() const { return cuda::output(view_); }
  const View& view() const { return view_; }

 private:
  View to_, view_;
};

}  // namespace octet::cuda
