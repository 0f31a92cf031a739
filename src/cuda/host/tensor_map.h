// Descriptors by which the tensor memory accelerator (TMA) finds tiles of a tensor.
#pragma once
#include <cuda.h>

#include "core/tensor.h"

namespace octet::cuda {

// Whether TMA can read a tensor of 16 or 8 bits as it lies: rows contiguous, all else at multiples of 16 bytes.
bool reads_directly(const View& t);

// Boxes of `rows` tokens by `columns` channels, 128, 64 or 32 bytes, under the swizzle of that width; what lies beyond
// the tensor reads as zero. A dimension of stride 0 is described as one element: the caller passes index 0 for it.
CUtensorMap tensor_map(const View& t, int rows, int columns = 64);

// Why the driver cannot make descriptors, or null.
const char* tensor_map_unsupported_reason();

}  // namespace octet::cuda
