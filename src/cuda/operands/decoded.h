// q, k and v that came quantized, in a form that the kernels of a precision do not take as it is: their numbers in f32,
// which are what the quantizers of octet.h give.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "core/backend.h"
#include "core/prequantized.h"

namespace octet::cuda {

// A problem with some of its operands as numbers.
class DecodedOperands {
 public:
  // `decodes`: which operands become numbers; others stay as they are. With a null workspace the numbers lie nowhere.
  DecodedOperands(const Problem& p, const Prequantized& decodes, void* workspace);
  const Problem& problem() const { return problem_; }
  std::size_t bytes() const { return bytes_; }  // of the workspace
  std::string names() const;                    // "q, k"
  void preprocess(cudaStream_t stream) const;

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

// Returns the answer to a problem, from that to its operands as numbers. `workspace` is that of `operands`.
template <class PlanOf>
Answer with_decoded_operands(std::shared_ptr<const DecodedOperands> operands, void* workspace,
                             const PlanOf& plan_of_numbers) {
  Answer answer = plan_of_numbers(operands->problem(),
                                  workspace ? static_cast<unsigned char*>(workspace) + operands->bytes() : nullptr);
  if (!answer.plan) return answer;
  const std::size_t bytes = operands->bytes() + answer.plan->workspace;
  auto name = [operands, kernel = std::move(answer.plan->kernel)] {
    return kernel() + ", with " + operands->names() + " decoded to f32";
  };
  return Plan{bytes, std::move(name), [operands, run = std::move(answer.plan->run)](void* stream) {
                operands->preprocess(static_cast<cudaStream_t>(stream));
                run(stream);
              }};
}

}  // namespace octet::cuda
