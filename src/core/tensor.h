// One tensor validated on its own, and pairs of tensors that must not share memory. Used for every call of octet.h.
#pragma once
#include <octet/octet.h>

#include <cstdint>
#include <initializer_list>

namespace octet {

// The pages in which a block table says that tokens lie (octet_arguments::block_table).
struct Pages {
  const int32_t* table = nullptr;
  int64_t stride = 0, columns = 0;  // of the table, whose rows are sequences
  int64_t size = 0;                 // tokens of a page; 0: there are none, and tokens lie where their strides say

  int64_t tokens() const { return columns * size; }  // of a sequence, at most

  struct Place {
    int64_t page, token;
  };
  // Returns where a token of a sequence lies. Its number may count on through the sequences before it.
  [[gnu::always_inline]] Place of(int64_t sequence, int64_t token) const {
    sequence += token / tokens(), token %= tokens();
    return {table[sequence * stride + token / size], token % size};
  }
};

// A view of the caller's memory, as octet_tensor. `data` is null if the tensor is absent or empty. Kernels for one
// instruction set call its functions, of which no copy may be left to the linker (tests/checks/kernels).
struct View {
  octet_dtype dtype = OCTET_DTYPE_NONE;  // OCTET_DTYPE_NONE: absent
  void* data = nullptr;
  int64_t shape[4] = {0, 0, 0, 0};   // batch, head, token, dim
  int64_t stride[4] = {0, 0, 0, 0};  // in elements
  const octet_quantization* quantization = nullptr;
  Pages pages{};  // of k and v, whose batch elements are pages then

  bool present() const { return dtype != OCTET_DTYPE_NONE; }
  int64_t elements() const { return shape[0] * shape[1] * shape[2] * shape[3]; }
  [[gnu::always_inline]] int64_t offset(int64_t b, int64_t h, int64_t t, int64_t c = 0) const {
    const auto [page, token] = place(b, t);
    return page * stride[0] + h * stride[1] + token * stride[2] + c * stride[3];
  }
  // Returns where a token lies: in its page, or as it is.
  [[gnu::always_inline]] Pages::Place place(int64_t b, int64_t t) const {
    return pages.size ? pages.of(b, t) : Pages::Place{b, t};
  }
  template <class T>
  [[gnu::always_inline]] T* at(int64_t b, int64_t h, int64_t t, int64_t c = 0) const {
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
