// Vectors of eight channels of a token, converted between memory of any type and strides and float32 registers.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "cuda/fragment/strided.h"
#include "cuda/ptx/types.h"

namespace octet::cuda {

constexpr int kVec8 = 8;  // head dims are multiples of this

using Vec8 = float[kVec8];

// The words by which a vector of T is loaded and stored.
template <class T>
struct Words {
  using Word = uint4;
};
template <>
struct Words<__nv_fp8_e4m3> {
  using Word = uint2;
};
template <>
struct Words<int8_t> {
  using Word = uint2;
};

template <class T>
__device__ void read_as(const T* x, int64_t stride, Vec8& to) {
  using Word = typename Words<T>::Word;
  constexpr int kWords = sizeof(T) * kVec8 / sizeof(Word);
  if (stride == 1 && reinterpret_cast<uintptr_t>(x) % sizeof(Word) == 0) {
    union {
      Word words[kWords];
      T elements[kVec8];
    } vec;
    for (int i = 0; i < kWords; ++i) vec.words[i] = reinterpret_cast<const Word*>(x)[i];
    for (int i = 0; i < kVec8; ++i) to[i] = float(vec.elements[i]);
    return;
  }
  for (int i = 0; i < kVec8; ++i) to[i] = float(x[i * stride]);
}

template <class T>
__device__ void write_as(T* x, int64_t stride, const Vec8& from) {
  using Word = typename Words<T>::Word;
  constexpr int kWords = sizeof(T) * kVec8 / sizeof(Word);
  if (stride == 1 && reinterpret_cast<uintptr_t>(x) % sizeof(Word) == 0) {
    union {
      Word words[kWords];
      T elements[kVec8];
    } vec;
    for (int i = 0; i < kVec8; ++i) vec.elements[i] = T(from[i]);
    for (int i = 0; i < kWords; ++i) reinterpret_cast<Word*>(x)[i] = vec.words[i];
    return;
  }
  for (int i = 0; i < kVec8; ++i) x[i * stride] = T(from[i]);
}

// Calls f with a null pointer to the element's type, which is one of floats.
template <class F>
__device__ void with_type(Element element, const F& f) {
  switch (element) {
    case Element::f32:
      return f(static_cast<float*>(nullptr));
    case Element::f16:
      return f(static_cast<__half*>(nullptr));
    case Element::bf16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
    case Element::e4m3:
      return f(static_cast<__nv_fp8_e4m3*>(nullptr));
    case Element::i8:
      break;
  }
}

// The index of a vector: 8 channels of one token, from `channel` on.
struct Index4 {
  int64_t batch, head, token, channel;
  __device__ int64_t offset(const Strided& t) const {
    return batch * t.stride[0] + head * t.stride[1] + token * t.stride[2] + channel * t.stride[3];
  }
};

// Bytes are read as integers.
__device__ inline void read(const Strided& t, const Index4& index, Vec8& x) {
  const auto read = [&](auto* type) { read_as(static_cast<decltype(type)>(t.data) + index.offset(t), t.stride[3], x); };
  t.element == Element::i8 ? read(static_cast<int8_t*>(nullptr)) : with_type(t.element, read);
}

// The element's type is one of floats.
__device__ inline void write(const Strided& t, const Index4& index, const Vec8& x) {
  with_type(t.element,
            [&](auto* type) { write_as(static_cast<decltype(type)>(t.data) + index.offset(t), t.stride[3], x); });
}

// Eight channels in the format of memory, which are converted later, so that many loads can be under way. `In`: the
// type of the tensor, whose vectors are whole words; void for any type and strides.
template <class In>
struct RawVec8 {
  using Word = typename Words<In>::Word;
  union {
    Word word;
    In elements[kVec8];
  };
  __device__ RawVec8() : word{} {}
  __device__ void load(const Strided& t, const Index4& index) {
    word = *reinterpret_cast<const Word*>(static_cast<const In*>(t.data) + index.offset(t));
  }
  __device__ void convert(Vec8& x) const {
    for (int i = 0; i < kVec8; ++i) x[i] = float(elements[i]);
  }
};
template <>
struct RawVec8<void> {
  Vec8 numbers{};
  __device__ void load(const Strided& t, const Index4& index) { read(t, index, numbers); }
  __device__ void convert(Vec8& x) const {
    for (int i = 0; i < kVec8; ++i) x[i] = numbers[i];
  }
};

// The rows of one (batch, head) of a tensor.
struct Head {
  const void* data;
  Element element;
  int dim;
  int64_t token, channel;  // strides
};
__device__ inline Head head_of(const Strided& t, int batch, int head) {
  Head h{nullptr, t.element, static_cast<int>(t.shape[3]), t.stride[2], t.stride[3]};
  with_type(t.element, [&](auto* type) {
    h.data = static_cast<decltype(type)>(t.data) + Index4{batch, head, 0, 0}.offset(t);
  });
  return h;
}

// The two ways in which a kernel loads vectors. Each loads in two parts: `load` fetches raw memory; `convert` makes
// floats of it, or `pair` those of elements 2 i and 2 i + 1. WordLoader takes tensors of one type whose vectors are
// whole words, and loads without a branch, so that many loads can be in flight. AnyLoader takes any tensor; its load
// only returns the address of the vector. A Column loads vectors of tokens that are `stride` apart.
template <class T>
struct WordLoader {
  using Element = T;
  static constexpr bool kWhole = true, kPairs = sizeof(T) == 2;  // kPairs: words hold two elements of 16 bits
  using Raw = typename Words<T>::Word;
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  static_assert(sizeof(Raw) == sizeof(T) * kVec8);
  static __device__ const T* at(const Head& h, int token, int channel) {
    return static_cast<const T*>(h.data) + token * h.token + channel;
  }
  static __device__ Raw load(const Head& h, int token, int channel) {
    return __ldg(reinterpret_cast<const Raw*>(at(h, token, channel)));
  }
  struct Column {
    const T* first;
    int64_t stride;
    __device__ Column(const Head& h, int token, int channel, int stride)
        : first(at(h, token, channel)), stride(stride * h.token) {}
    __device__ Raw operator[](int i) const { return __ldg(reinterpret_cast<const Raw*>(first + i * stride)); }
  };
  static __device__ float2 pair(const Raw& raw, int i) {
    if constexpr (kPairs) return ptx::unpack<T>(reinterpret_cast<const uint32_t*>(&raw)[i]);
    const T* elements = reinterpret_cast<const T*>(&raw);
    return {float(elements[2 * i]), float(elements[2 * i + 1])};
  }
  static __device__ void convert(const Raw& raw, Vec8& x) {
#pragma unroll
    for (int i = 0; i < kVec8 / 2; ++i) {
      const float2 two = pair(raw, i);
      x[2 * i] = two.x, x[2 * i + 1] = two.y;
    }
  }
  // Sets each element of `most` to the larger of it and the magnitude of raw. NaN does not count.
  static __device__ void raise(Raw& most, const Raw& raw) {
    auto* const to = reinterpret_cast<Pair*>(&most);
    const auto* const from = reinterpret_cast<const Pair*>(&raw);
#pragma unroll
    for (int i = 0; i < kVec8 / 2; ++i) to[i] = __hmax2(to[i], __habs2(from[i]));
  }
  // Sets numbers from `limit` on, a power of two or infinity, to 0, and NaNs, too.
  static __device__ void cut(Raw& raw, float limit) {
    auto* const words = reinterpret_cast<uint32_t*>(&raw);
    const Pair below{T(limit), T(limit)};
#pragma unroll
    for (int i = 0; i < kVec8 / 2; ++i)
      words[i] &= __hlt2_mask(__habs2(reinterpret_cast<const Pair*>(words)[i]), below);
  }
};
// Its functions are not inlined, because copies of their branches take the compiler a minute.
struct AnyLoader {
  static constexpr bool kWhole = false, kPairs = false;
  struct Raw {
    const void* data;  // null: zeros
    octet::cuda::Element element;
    int64_t stride;
  };
  static __device__ __noinline__ Raw load(const Head& h, int token, int channel) {
    Raw raw{};
    with_type(h.element, [&](auto* type) {
      raw = {static_cast<const std::remove_pointer_t<decltype(type)>*>(h.data) + token * h.token + channel * h.channel,
             h.element, h.channel};
    });
    return raw;
  }
  struct Column {
    Head head;
    int token, channel, stride;
    __device__ Column(const Head& h, int token, int channel, int stride)
        : head(h), token(token), channel(channel), stride(stride) {}
    __device__ Raw operator[](int i) const { return load(head, token + i * stride, channel); }
  };
  static __device__ __noinline__ float2 pair(const Raw& raw, int i) {
    float2 two{};
    if (raw.data)
      with_type(raw.element, [&](auto* type) {
        const auto* x = static_cast<const std::remove_pointer_t<decltype(type)>*>(raw.data) + 2 * i * raw.stride;
        two = {float(x[0]), float(x[raw.stride])};
      });
    return two;
  }
  static __device__ void convert(const Raw& raw, Vec8& x) {
    for (int i = 0; i < kVec8 / 2; ++i) {
      const float2 two = pair(raw, i);
      x[2 * i] = two.x, x[2 * i + 1] = two.y;
    }
  }
};

// Returns true if the vectors of a tensor with elements of `size` bytes are whole words.
inline bool in_words(const Strided& t, int size) {
  const int word = size == 1 ? 8 : 16;
  if (reinterpret_cast<uintptr_t>(t.data) % word || (t.shape[3] > 1 && t.stride[3] != 1)) return false;
  for (int i = 0; i < 3; ++i)
    if (t.shape[i] > 1 && t.stride[i] * size % word) return false;
  return true;
}

// Calls f with the fastest loader that can load all of the tensors.
template <class F>
void with_loader(std::initializer_list<const Strided*> tensors, const F& f) {
  const auto all = [&](Element element, int size) {
    for (const Strided* t : tensors)
      if (t->element != element || !in_words(*t, size)) return false;
    return true;
  };
  if (all(Element::bf16, 2)) return f(WordLoader<__nv_bfloat16>{});
  if (all(Element::f16, 2)) return f(WordLoader<__half>{});
  if (all(Element::e4m3, 1)) return f(WordLoader<__nv_fp8_e4m3>{});
  f(AnyLoader{});
}

}  // namespace octet::cuda
