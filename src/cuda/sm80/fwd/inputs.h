// The operands of the forward kernels, made of those of a problem before the kernel runs.
#pragma once
#include <cuda_runtime_api.h>

#include <optional>
#include <vector>

#include "cuda/operands/contiguous.h"
#include "cuda/operands/quantize/int8_logits.h"
#include "cuda/operands/seen.h"
#include "cuda/sm80/fwd/choose.h"
#include "cuda/sm80/fwd/params.h"

namespace octet::cuda::sm80 {

// Returns up to `count` channels of a tensor, from channel `first` on.
View columns_of(View t, int64_t first, int64_t count);

// q, k and v in one of four forms: 16 bits, f16 halves of f32, q and k in int8, or all in int8. A v of 16 bits may be
// scaled.
class ForwardInputs {
 public:
  ForwardInputs(const Problem& p, const ForwardChoice& choice, WorkspaceAllocator& workspace);
  void preprocess(const Problem& p, cudaStream_t stream) const;
  // Sets the parameters of the kernel that belong to the operands.
  void set(const Problem& p, ForwardParams& a) const;
  // Sets those of channels [first, first + the kernel's dim_v) of v.
  void set_v(int64_t first, ForwardParams& a) const;

 private:
  int dim_, dim_v_;  // the kernel's
  bool halves_, scales_v_, int8_v_;
  SeenKeySide seen_;
  Input q_, k_, v_;
  ScaledInput v_scaled_;
  F16HalvesInput q_halves_, k_halves_;
  std::vector<F16HalvesInput> v_halves_;  // of so many channels as the kernel multiplies
  std::optional<Int8Logits> int8_;
  KeyPairFactors* key_factors_ = nullptr;
};

}  // namespace octet::cuda::sm80
