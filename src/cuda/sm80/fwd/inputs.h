// The operands of the forward kernels, made of those of a problem before the kernel runs.
#pragma once
#include <cuda_runtime_api.h>

#include <optional>
#include <vector>

#include "cuda/operands/contiguous.h"
#include "cuda/operands/quantize/e4m3.h"
#include "cuda/operands/quantize/int8_logits.h"
#include "cuda/operands/quantize/training.h"
#include "cuda/operands/seen.h"
#include "cuda/sm80/fwd/choose.h"
#include "cuda/sm80/fwd/params.h"

namespace octet::cuda::sm80 {

// Returns up to `count` channels of a tensor, from channel `first` on.
View columns_of(View t, int64_t first, int64_t count);

// q, k and v in one of these forms: 16 bits; f16 halves of f32; q and k in int8 and v in 16 bits, in int8, in f16 that
// comes from int8, for training, or in e4m3; all in e4m3. A v of 16 bits may be scaled.
class ForwardInputs {
 public:
  ForwardInputs(const Problem& p, const ForwardChoice& choice, WorkspaceAllocator& workspace);
  void preprocess(const Problem& p, cudaStream_t stream) const;
  // Sets the parameters of the kernel that belong to the operands.
  void set(const Problem& p, ForwardParams& a) const;
  // Sets those of channels [first, first + the kernel's dim_v) of v.
  void set_v(int64_t first, ForwardParams& a) const;

 private:
  // Calls f with q and k of 8 bits.
  template <class F>
  void with_8bit_logits(const F& f) const {
    if (int8_) f(*int8_);
    if (e4m3_) f(*e4m3_);
  }
  void preprocess_training(const Problem& p, cudaStream_t stream) const;
  void set_training(const Problem& p, ForwardParams& a) const;

  int dim_, dim_v_;  // the kernel's
  bool halves_, scales_v_, int8_v_, k_groups_, pages_of_codes_;
  SeenKeySide seen_;
  Input q_, k_, v_;
  ScaledInput v_scaled_;
  F16HalvesInput q_halves_, k_halves_;
  std::vector<F16HalvesInput> v_halves_;  // of so many channels as the kernel multiplies
  std::optional<Int8Logits> int8_;
  std::optional<TrainingOperands> training_;
  std::optional<E4m3Operands> e4m3_;
  std::optional<E4m3Rows> e4m3_values_;  // beside int8_
  KeyPairFactors* key_factors_ = nullptr;
  F16Rows q_f16_{};       // of training
  F16* v_f16_ = nullptr;  // likewise
  float* v_scale_ = nullptr;
  float* zero_v_mean_ = nullptr;  // with dropout, where a row of P does not sum to 1, v keeps its mean
};

}  // namespace octet::cuda::sm80
