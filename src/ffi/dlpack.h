// DLPack 1.x with its exchange API (https://dmlc.github.io/dlpack), as far as octet uses it.
#pragma once

#include <cstdint>

struct DLDevice {
  int32_t type, index;
};
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t dims;
  DLDataType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct DLManagedTensor {
  uint32_t major, minor;
  void* context;
  void (*deleter)(DLManagedTensor*);
  uint64_t flags;
  DLTensor tensor;
};
struct DLExchange {
  uint32_t major, minor;
  const DLExchange* previous;
  int (*allocate)(DLTensor* like, DLManagedTensor** out, void* context, void (*fail)(void*, const char*, const char*));
  int (*own)(void* object, DLManagedTensor** out);
  int (*give)(DLManagedTensor* tensor, void** object);
  int (*view)(void* object, DLTensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_index, void** stream);
};
constexpr int32_t kDLCpu = 1, kDLCuda = 2;
constexpr DLDataType kBytes = {1, 8, 1};
