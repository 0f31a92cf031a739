// An array after octet_quantize: its codes and all that gives them meaning.
#pragma once
#include <octet/octet.hpp>

#include "array.h"

namespace octet::cli {

struct QuantizerOptions {
  octet_operand operand = OCTET_OPERAND_Q;
  DType format = DType::i8;
  octet_granularity granularity = OCTET_PER_TOKEN;
  int64_t block = 0;
  octet_zero_point zero_point = OCTET_SYMMETRIC;
  bool smooth = false;
  uint64_t hadamard_seed = 0;
  octet_rope rope = OCTET_ROPE_INIT;  // without its weights
  Array norm_weight;

  // Calls f with the rope and its weights.
  template <class F>
  void with_rope(const F& f) const {
    octet_rope whole = rope;
    const Tensor weight = norm_weight.view();
    if (norm_weight.present()) whole.norm_weight = &weight;
    f(whole);
  }
};

class Quantized {
 public:
  Quantized(const Array& x, const QuantizerOptions& options);
  Quantized(const Quantized&) = delete;  // views point into it

  const Tensor& view() const { return codes_view_; }  // codes with their quantization
  Array dequantized(DType dtype) const;

  Array codes, scale, zero_point, mean, statistics;

 private:
  Tensor codes_view_, scale_view_, zero_point_view_, mean_view_;
  octet_quantization quantization_ = OCTET_QUANTIZATION_INIT;
};

}  // namespace octet::cli
