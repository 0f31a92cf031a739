#include "cuda/host/tensor_map.h"

#include <cudaTypedefs.h>

#include <algorithm>

#include "cuda/host/status.h"

namespace octet::cuda {
namespace {

constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;

int64_t size_of(octet_dtype type) { return type == OCTET_I8 || type == OCTET_E4M3 ? 1 : 2; }

CUtensorMapDataType type_of(octet_dtype type) {
  return type == OCTET_F16    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
         : type == OCTET_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                              : CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

// Looks the function up at run time, so that the library loads without a driver.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return found;
}

}  // namespace

const char* tensor_map_unsupported_reason() {
  return encoder() ? nullptr : "the driver has no cuTensorMapEncodeTiled (CUDA 12.0)";
}

bool reads_directly(const View& t) {
  if (reinterpret_cast<uintptr_t>(t.data) % 16 || (t.shape[3] > 1 && t.stride[3] != 1)) return false;
  for (int i = 0; i < 3; ++i) {
    const int64_t bytes = size_of(t.dtype) * t.stride[i];
    if (t.shape[i] > 1 && bytes && (bytes < 0 || bytes % 16 || bytes >= kMaxStrideBytes)) return false;
    if (t.shape[i] > 1 && !bytes && i == 2) return false;  // TMA cannot repeat one token
  }
  return true;
}

CUtensorMap tensor_map(const View& t, int rows, int columns) {
  const int64_t size = size_of(t.dtype);
  // TMA lists dimensions from the innermost: dim, token, head, batch.
  cuuint64_t shape[4], stride[3];
  for (int i = 0; i < 4; ++i) shape[i] = static_cast<cuuint64_t>(t.shape[3 - i]);
  for (int i = 0; i < 3; ++i) {
    const int64_t elements = t.stride[2 - i];
    if (elements == 0) shape[i + 1] = 1;
    // The stride of a dimension with one element is never used, but has to be valid.
    stride[i] = shape[i + 1] == 1 ? 16 * ((size * shape[0] + 15) / 16) : static_cast<cuuint64_t>(size * elements);
  }
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(columns), static_cast<cuuint32_t>(rows), 1, 1},
                   element_stride[4] = {1, 1, 1, 1};
  const CUtensorMapSwizzle swizzle = columns * size == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : columns * size == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                            : CU_TENSOR_MAP_SWIZZLE_32B;
  CUtensorMap map;
  const CUresult result =
      encoder()(&map, type_of(t.dtype), 4, t.data, shape, stride, box, element_stride, CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw Failure(OCTET_FAILURE, text("cuTensorMapEncodeTiled: error ", static_cast<int>(result)));
  return map;
}

}  // namespace octet::cuda
