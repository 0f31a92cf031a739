// The operands of a backward pass in int8 by blocks (operands_blocks.h), made before the kernel runs.
#pragma once
#include <cuda_runtime_api.h>

#include "core/problem.h"
#include "cuda/bwd/choose.h"
#include "cuda/bwd/preprocess.h"
#include "cuda/operands/quantize/int8_logits.h"
#include "cuda/operands/seen.h"
#include "cuda/sm80/bwd/operands_blocks.h"

namespace octet::cuda::sm80 {

class BlockInputs {
 public:
  // `params` has the do whose hidden rows are 0.
  BlockInputs(const Problem& p, const BackwardChoice& choice, const PreprocessParams& params,
              WorkspaceAllocator& workspace);
  void quantize(cudaStream_t stream) const;
  // Writes the values of q, k and do as tiles, once preprocessing has written its own. Of tokens that are not finite
  // all are 0; a query that is one, or whose delta is not finite, gets an lse of NaN. lse loses what the mean of k adds
  // to the logits. Sums of rows of ds, which preprocessing has found from an lse without row bias, are found again from
  // the saved one, if they are wanted.
  void write_tiles(const PreprocessParams& params, const Strided& saved_lse, cudaStream_t stream) const;
  BlockOperands::Terms terms() const;

 private:
  SeenKeySide seen_;
  Int8Logits logits_;
  BlockScaledRows do_;
  unsigned char* do_values_;  // tiles
  bool softcap_, adds_mean_;
};

}  // namespace octet::cuda::sm80
