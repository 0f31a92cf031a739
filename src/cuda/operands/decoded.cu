#include "cuda/operands/contiguous.h"
#include "cuda/operands/decoded.h"

namespace octet::cuda {

DecodedOperands::DecodedOperands(const Problem& p, const Prequantized& decodes, void* workspace) : problem_(p) {
  WorkspaceAllocator allocator(workspace);
  const auto decode = [&](bool wanted, const char* name, Place operand) {
    if (!wanted) return;
    operands_[count_++] = {name, p.*operand, operand};
    View& numbers = problem_.*operand;
    numbers = contiguous(p.*operand, OCTET_F32, allocator);
    numbers.quantization = nullptr;
  };
  decode(decodes.q, "q", &Problem::q), decode(decodes.k, "k", &Problem::k), decode(decodes.v, "v", &Problem::v);
  bytes_ = allocator.used();
}

std::string DecodedOperands::note() const {
  std::string list;
  for (int i = 0; i < count_; ++i) list += (i ? ", " : "") + std::string(operands_[i].name);
  return ", with " + list + " decoded to f32";
}

void DecodedOperands::preprocess(cudaStream_t stream) const {
  for (int i = 0; i < count_; ++i) {
    const Operand& x = operands_[i];
    dequantize(x.from, quantization_of(x.from), problem_.*x.to, {problem_.device_index, stream});
  }
}

}  // namespace octet::cuda
