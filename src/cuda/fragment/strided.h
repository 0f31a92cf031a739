// Tensors as the kernels of operands/ see them.
#pragma once
#include <cstdint>

namespace octet::cuda {

enum class Element : int { f32, f16, bf16, e4m3, i8 };  // i8: the residual of o, see o_residual.h

// A [batch, head, token, dim] tensor; strides in elements.
struct Strided {
  void* data;
  int64_t shape[4], stride[4];
  Element element;
};

}  // namespace octet::cuda
