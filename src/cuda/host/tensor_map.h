// Descriptors by which the tensor memory accelerator (TMA) finds tiles of a tensor.
#pragma once
#include <cuda.h>

#include "core/tensor.h"

namespace octet::cuda {

// Whether TMA can read a tensor of 16-bit numbers as it lies: rows contiguous, all else at multiples of 16 bytes.
bool reads_directly(const View& t);

// Boxes of `rows` tokens by 64 channels under the 128-byte swizzle; what lies beyond the tensor reads as zero.
// A dimension of stride 0 is described as one element: the caller passes index 0 for it.
CUtensorMap tensor_map(const View& t, int rows);

// Why the driver cannot make descriptors, or null.
const char* tensor_map_objection();

}  // namespace octet::cuda
