// Tensor maps, the descriptors by which the tensor memory accelerator (TMA) finds tiles of a tensor.
#pragma once
#include <cuda.h>

#include "core/tensor.h"

namespace octet::cuda {

// Returns true if TMA can read a tensor of 16 or 8 bits in place: rows are contiguous, and the start and all other
// strides are multiples of 16 bytes.
bool reads_directly(const View& t);

// Describes boxes of `rows` tokens by `columns` channels, 128, 64 or 32 bytes wide, under the swizzle of that width.
// Elements beyond the tensor read as zero. A dimension of stride 0 is described as one element: the caller passes index
// 0 for it.
CUtensorMap tensor_map(const View& t, int rows, int columns = 64);

// Returns the reason why the driver cannot make tensor maps, or null if it can.
const char* tensor_map_unsupported_reason();

}  // namespace octet::cuda
