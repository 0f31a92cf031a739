// One tensor validated on its own, and pairs of tensors that must not share memory. Used for every call of octet.h.
#pragma once
#include <octet/octet.h>

#include <cstdint>
#include <initializer_list>

namespace octet {

// A view of the caller's memory, as octet_tensor. `data` is null if the tensor is absent or empty.
struct View {
  octet_dtype dtype = OCTET_DTYPE_NONE;  // OCTET_DTYPE_NONE: absent
  void* data = nullptr;
  int64_t shape[4] = {0, 0, 0, 0};   // batch, head, token, dim
  int64_t stride[4] = {0, 0, 0, 0};  // in elements
  const octet_quantization* quantization = nullptr;

  bool present() const { return dtype != OCTET_DTYPE_NONE; }
  int64_t elements() const { return shape[0] * shape[1] * shape[2] * shape[3]; }
  int64_t offset(int64_t b, int64_t h, int64_t t, int64_t c = 0) const {
    return b * stride[0] + h * stride[1] + t * stride[2] + c * stride[3];
  }
  template <class T>
  T* at(int64_t b, int64_t h, int64_t t, int64_t c = 0) const {
    return static_cast<T*>(data) + offset(b, h, t, c);
  }
};

// Size field, dtype, device, shape, strides, address.
View validate_tensor(const octet_tensor* tensor, const char* label);

void expect_dtype(const View& t, const char* label, std::initializer_list<octet_dtype> allowed);
void expect_shape(const View& t, const char* label, const int64_t (&want)[4], const char* why);

// Rejects an output two elements of which may be one: strides have to nest, as those of every permuted, padded or
// interleaved layout do.
void expect_distinct_elements(const View& out, const char* label);

// Rejects an output that shares an element with another tensor of the call. Tensors interleaved in one buffer, as
// q, k and v in a packed projection, share none. Where two tensors interleave with different strides, sharing is
// assumed.
void expect_no_overlap(const View& out, const char* out_label, const View& other, const char* other_label);
void expect_no_overlap(const void* memory, std::size_t bytes, const char* memory_label, const View& other,
                       const char* other_label);

}  // namespace octet
