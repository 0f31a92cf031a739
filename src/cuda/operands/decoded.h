// q, k and v that came quantized, in a form that the kernels of a precision do not take as it is: their numbers in f32,
// which are what the quantizers of octet.h give.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "core/prequantized.h"

namespace octet::cuda {

// A problem with some of its operands as numbers (operands/rewritten.h).
class DecodedOperands {
 public:
  // `decodes`: which operands become numbers; others stay as they are. With a null workspace the numbers lie nowhere.
  DecodedOperands(const Problem& p, const Prequantized& decodes, void* workspace);
  const Problem& problem() const { return problem_; }
  std::size_t bytes() const { return bytes_; }  // of the workspace
  std::string note() const;
  void preprocess(cudaStream_t stream) const;
  void deliver(cudaStream_t) const {}

 private:
  using Place = View Problem::*;
  struct Operand {
    const char* name;
    View from;
    Place to;
  };
  Operand operands_[3];
  int count_ = 0;
  Problem problem_;
  std::size_t bytes_;
};

}  // namespace octet::cuda
